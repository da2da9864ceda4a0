"""Host-side client of the guest agent envd."""
