"""Inside each process: detect its rank, join the others, compare values, and watch for hangs."""
