"""Hooks that are ready to use, one a file."""
