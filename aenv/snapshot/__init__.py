"""Capture and restore of machines."""
