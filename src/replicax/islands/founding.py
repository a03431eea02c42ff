"""Which islands found a group, whether an island fits to others, and for whom one waits."""

import json
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import NoReturn

from replicax.cluster.differences import field_differences, first_of, islands_text
from replicax.cluster.failure import say
from replicax.errors import AgreementError
from replicax.islands.agreement import IslandStart
from replicax.islands.island_network import Network
from replicax.islands.island_place import IslandPlace
from replicax.islands.messages import Out, Ready
from replicax.islands.peer import IslandPeer

Candidates = Mapping[int, tuple[str, Ready]]
"""Start and message of each island that asks to become a member, by index."""
_START_ALIKE = "start all with the same code, data and arguments, in the same environment"
_SAYS_SECONDS = 10.0, 60.0
_REFUSES_SECONDS, _AGAIN_SECONDS = 10.0, 0.2
"""How long an island that does not fit to the others waits for those that are not there yet."""
FOUND_SECONDS = 30.0
"""How long to wait for all islands before most of them found the group."""


def disagreement(fields: Mapping[int, str]) -> str | None:
    """Return why islands with these fields, in JSON, cannot train together, if so."""
    if len(set(fields.values())) == 1:
        return None
    islands = list(fields)
    differences = field_differences(
        list(map(json.loads, fields.values())), lambda n: islands_text([islands[i] for i in n])
    )
    return f"the islands disagree: {first_of(differences)}: {_START_ALIKE}" if differences else None


class AwaitedIslands:
    """Says for whom an island waits that asks to become a member: after 10 s, then every minute."""

    def __init__(self, place: IslandPlace, network: Network) -> None:
        self._place, self._network = place, network
        self._says = time.monotonic() + _SAYS_SECONDS[0]

    def tell(self, ready: Collection[int], giver: int) -> None:
        """Say it, if it is time; `giver` is the one that gives the state, if all are `ready`."""
        if time.monotonic() < self._says:
            return
        self._says += _SAYS_SECONDS[1]
        whom = "; ".join(self.awaited(ready)) or f"the state of the run, from island {giver}"
        say(f"island {self._place.index} waits for {whom}")

    def awaited(self, ready: Collection[int]) -> list[str]:
        """Return the islands that are not there or not `ready`, with their addresses and why."""
        missing, peers, troubles = [], self._network.peers, self._network.troubles
        for index, address in enumerate(self._place.addresses):
            if index == self._place.index or (index in ready and index in peers):
                continue
            why = "it is compiling its step" if index in peers else troubles.get(index, "no word")
            missing.append(f"island {index} ({address}): {why}")
        return missing


def refuse(
    network: Network,
    others: Collection[int],
    why: str,
    changed: threading.Condition,
    refused_by: Collection[int],
) -> NoReturn:
    """Raise `AgreementError`, once none of the `others` can wait for this island any more.

    Such a one has said that it refuses, too, or was told and is gone. `changed` is held, which
    frees the thread that adds to `refused_by`.
    """
    notified, until = set[IslandPeer](), time.monotonic() + _REFUSES_SECONDS

    def waits(index: int) -> bool:
        # A connection may be replaced before what was said on it is heard; then it is no trouble.
        gone = index in network.troubles and any(peer.index == index for peer in notified)
        return not (index in refused_by or gone)

    while any(map(waits, others)) and time.monotonic() < until:
        for peer in {*network.peers.values()} - notified:
            peer.send(Out(why, is_final=True))
            notified.add(peer)
        changed.wait(_AGAIN_SECONDS)
    raise AgreementError(why)


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
    sights = [{index, *candidates[index][1].sees} for index in ready if index != me[0]]
    # Who does not see another one would take it for lost.
    if enough and min(ready) == me[0] and all(ready.keys() <= sees for sees in sights):
        return list(ready.items())
    return []
