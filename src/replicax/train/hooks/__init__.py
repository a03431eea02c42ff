"""Built-in hooks."""
