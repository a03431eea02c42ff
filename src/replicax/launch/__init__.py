"""Outside the processes: starts them, on this host or through an engine, and watches over them."""
