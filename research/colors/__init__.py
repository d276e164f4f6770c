"""`calm colors`: where memory lies in the caches, and which of it fights for the same place."""
