"""Host batches -> padded, masked, split, prefetched global arrays."""
