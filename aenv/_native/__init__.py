"""Compiled hot paths and kernel interfaces."""
