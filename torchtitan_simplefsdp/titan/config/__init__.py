"""Configuration: our keys, parsing, and every check that runs before a process group exists."""
