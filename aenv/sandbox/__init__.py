"""Life cycle of sandboxes."""
