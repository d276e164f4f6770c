"""`calm profile`: where shootdowns, page faults and memory system calls come from."""
