"""Implement `replicax lint`: find common errors in data-parallel code without running it."""
