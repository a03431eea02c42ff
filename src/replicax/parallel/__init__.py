"""The heart: one update, lifted four ways."""
