"""Disks, snapshots and their files."""
