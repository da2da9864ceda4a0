"""Programs around the project: set-up, demo."""
