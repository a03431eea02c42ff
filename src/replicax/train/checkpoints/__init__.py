"""Checkpoints: written whole, verified before they are trusted."""
