"""Inside each process: find its place, join the others, agree with them, and watch for hangs."""
