"""Analyze the memory, FLOPs and communication of compiled programs."""
