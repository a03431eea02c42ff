"""Checkpoints: written atomically and verified before use."""
