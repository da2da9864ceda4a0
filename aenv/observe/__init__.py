"""Metrics, logs, events."""
