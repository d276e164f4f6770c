"""`calm tune`: searches settings of malloc, and advises some by rules."""
