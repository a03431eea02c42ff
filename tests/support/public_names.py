"""The public names: those of `replicax`, and those of its rooms, such as `rx.hooks.CSV`."""

from typing import Any

import replicax as rx

ROOMS = ("errors", "hooks", "optimizers", "types")
MODULES = {*ROOMS, "losses", "remat", "weights"}
PLACES = {
    **{name: name for name in rx.__all__ if name not in MODULES},
    **{name: f"{room}.{name}" for room in ROOMS for name in getattr(rx, room).__all__},
}
"""Where each is in `replicax`."""
PUBLIC: dict[str, Any] = {
    name: getattr(getattr(rx, place.split(".")[0]) if "." in place else rx, name)
    for name, place in PLACES.items()
}
