"""`calm bench`: one suite of programs under every allocator, by time and by memory."""
