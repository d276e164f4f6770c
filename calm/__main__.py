"""Lets `python -m calm` be the command."""

from calm.cli import main

if __name__ == "__main__":
    main()
