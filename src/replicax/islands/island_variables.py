"""Environment variables that define an island's place; `replicax launch --islands` sets them."""

ISLAND = "REPLICAX_ISLAND"
"""Index of this island, from 0."""
ISLANDS = "REPLICAX_ISLANDS"
"""`host:port` of every island, in order, separated by commas."""
