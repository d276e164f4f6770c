"""`calm explain`: why the memory of a process is what it is."""
