"""`replicax lint`: the classic errors of data-parallel code, found by reading it."""
