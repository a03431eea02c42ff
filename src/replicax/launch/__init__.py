"""Outside the processes: start them, on this host or through an engine, and supervise them."""
