"""The benchmark suite: its cases, and what runs them."""
