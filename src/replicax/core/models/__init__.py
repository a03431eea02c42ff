"""Any model <-> its parameters and its other arrays."""
