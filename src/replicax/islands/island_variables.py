"""Environment variables that define an island's place; `replicax launch --islands` sets them."""

from replicax.core.ground.job import ISLANDS

__all__ = ["ISLAND", "ISLANDS"]

ISLAND = "REPLICAX_ISLAND"
"""Index of this island, from 0."""
