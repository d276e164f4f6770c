"""What the commands are built on: processes, measuring, statistics, tables and pictures."""
