"""Loggers: hooks that send a run's records elsewhere, one place a file."""
