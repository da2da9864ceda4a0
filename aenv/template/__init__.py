"""Building templates."""
