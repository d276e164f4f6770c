"""`calm top`: what running processes do with their memory, live."""
