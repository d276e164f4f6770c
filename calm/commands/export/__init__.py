"""`calm export`."""
