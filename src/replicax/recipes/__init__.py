"""Whole training jobs, each readable from top to bottom."""
