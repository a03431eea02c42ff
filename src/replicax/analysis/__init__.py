"""A compiled program -> its memory, FLOPs and communication."""
