"""Measurements. Each prints one JSON object: host facts and rows; see `aenv bench --help`."""
