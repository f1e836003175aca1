"""References for attention and its paged cache."""
