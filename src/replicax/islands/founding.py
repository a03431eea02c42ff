"""Which islands found a group, and whether an island fits to others."""

import json
from collections.abc import Callable, Collection, Mapping

from replicax.cluster.differences import field_differences, first_of, islands_text
from replicax.islands.agreement import IslandStart
from replicax.islands.island_place import IslandPlace
from replicax.islands.messages import Ready

Candidates = Mapping[int, tuple[str, Ready]]
"""Start and message of each island that asks to become a member, by index."""
_START_ALIKE = "start all with the same code, data and arguments, in the same environment"
FOUND_SECONDS = 30.0
"""How long to wait for all islands before most of them found the group."""


def disagreement(fields: Mapping[int, str]) -> str | None:
    """Return why islands with these fields, in JSON, cannot train together, if so."""
    if len(set(fields.values())) == 1:
        return None
    islands = list(fields)
    found = field_differences(
        list(map(json.loads, fields.values())), lambda n: islands_text([islands[i] for i in n])
    )
    return f"the islands disagree: {first_of(found)}: {_START_ALIKE}" if found else None


def awaited(
    place: IslandPlace, ready: Collection[int], peers: Collection[int], troubles: Mapping[int, str]
) -> list[str]:
    """Return the islands that are not `ready`, with their addresses and why: of `troubles`."""
    found = []
    for index, address in enumerate(place.addresses):
        if index != place.index and index not in ready:
            why = (
                "it is compiling its step" if index in peers else troubles.get(index, "no word yet")
            )
            found.append(f"island {index} ({address}): {why}")
    return found


def founders(
    me: IslandStart,
    everyone: int,
    candidates: Candidates,
    peers: Collection[int],
    waited_seconds: float,
    is_over: Callable[[], bool],
) -> list[IslandStart]:
    """Return the members of a new group if `me` is the first of enough islands, else nothing.

    `everyone` is the number of islands, `peers` are those connected to this one. Enough are all,
    or after `FOUND_SECONDS` more than half; or any, if their run `is_over`.
    """
    ready = {index: start for index, (start, _) in candidates.items() if index in peers}
    ready[me[0]] = me[1]
    enough = len(ready) == everyone
    if not enough and waited_seconds > FOUND_SECONDS:
        enough = 2 * len(ready) > everyone or is_over()
    seen = [{index, *candidates[index][1].sees} for index in ready if index != me[0]]
    # Who does not see another one would take it for lost.
    if enough and min(ready) == me[0] and all(ready.keys() <= each for each in seen):
        return list(ready.items())
    return []
