"""The commands, one module or package each."""
