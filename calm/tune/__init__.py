"""`calm tune`: a search of settings for time and memory at once."""
