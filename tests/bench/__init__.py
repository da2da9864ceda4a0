"""Tests of the benches: what they print can be relied on."""
