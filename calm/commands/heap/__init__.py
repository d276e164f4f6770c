"""`calm heap`: which code holds memory, by calmalloc's sampled heap profile."""
