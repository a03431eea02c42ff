"""The same numbers on any number of devices, and proof of it."""
