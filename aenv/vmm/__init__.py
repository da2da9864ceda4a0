"""Virtual machine monitors behind one interface."""
