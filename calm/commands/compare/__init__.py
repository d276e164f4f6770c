"""One program under several allocators."""
