"""Minimal HTTP/1.1 on asyncio: httptools parses, we do the rest."""
