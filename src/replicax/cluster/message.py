"""The base of the messages between processes: their types are checked on receipt."""

import msgspec


class Typed(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """A message: a JSON array of its class's name and its fields."""
