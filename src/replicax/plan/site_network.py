"""The network between islands: one link for each, or one for each pair of sites."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from replicax.errors import ConfigError

NETWORK_EXAMPLE = "100 Mbit/s, 20 ms"
PAIRS_EXAMPLE = "paris-oslo=100Mbit,30ms; paris-rome=1Gbit,20ms; oslo-rome=100Mbit,45ms"
_SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BITS = {"bit": 8.0, "B": 1.0}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
_RATE = rf"{_NUMBER}\s*([kMGT]?)(bit|B)(?:/s|ps)?"
_LINK = re.compile(rf"\s*{_RATE}(?:\s*,\s*{_NUMBER}\s*(s|ms|us|µs))?\s*")


@dataclass(frozen=True)
class IslandLink:
    """The network of one island, to all others together, or of a pair of sites."""

    text: str
    bytes_per_second: float
    """Rate at which it can send, while receiving at the same rate."""
    round_trip_seconds: float


@dataclass(frozen=True)
class SiteNetwork:
    """Links by pair of sites, or one under "", which every island has to all others together."""

    text: str
    links: Mapping[str, IslandLink]
    sites: tuple[str, ...] = ()
    """Names of the sites, if the links are those of pairs."""

    @property
    def islands(self) -> int:
        """The number of islands: the sites that are named, or two."""
        return len(self.sites) or 2

    def seconds(self, bytes_to_each: float, islands: int, round_trips: int = 1) -> float:
        """Return the time in which every island sends so many bytes to every other one.

        One link carries what goes to all others; links of pairs work side by side, and the
        slowest pair is waited for.
        """
        copies = 1 if self.sites else islands - 1
        if not copies:
            return 0.0
        return max(
            copies * bytes_to_each / link.bytes_per_second + round_trips * link.round_trip_seconds
            for link in self.links.values()
        )


def parse_network(network: str | Mapping[str, str]) -> SiteNetwork:
    """Parse a rate and a round trip, `100 Mbit/s, 20 ms`, or those of each pair of sites.

    The round trip may be left out; it is then 0. Pairs are a mapping or are separated by
    semicolons: `paris-oslo=100Mbit,30ms; oslo-rome=1Gbit,40ms; paris-rome=1Gbit,20ms`.

    Raises:
        ConfigError: neither of these; a rate of 0; a pair that is missing or given twice.
    """
    if isinstance(network, str) and "=" not in network:
        return SiteNetwork(network.strip(), {"": _link(network, network)})
    if isinstance(network, str):
        parts = [part.partition("=") for part in network.split(";") if part.strip()]
        given = [(name.strip(), link) for name, _, link in parts]
        text = network.strip()
    else:
        given = list(network.items())
        text = "; ".join(f"{name}={link}" for name, link in given)
    links: dict[str, IslandLink] = {}
    for name, link in given:
        pair = tuple(site.strip() for site in name.split("-"))
        if len(pair) != 2 or not all(pair) or pair[0] == pair[1]:
            _refuse(text, f"{name!r} is no pair of two sites")
        first, second = sorted(pair)
        if f"{first}-{second}" in links:
            _refuse(text, f"{name} is given twice")
        links[f"{first}-{second}"] = _link(link, text)
    sites = sorted({site for pair in links for site in pair.split("-")})
    missing = [f"{a}-{b}" for a, b in itertools.combinations(sites, 2) if f"{a}-{b}" not in links]
    if missing:
        _refuse(text, f"{len(sites)} sites without a link for {', '.join(missing)}")
    return SiteNetwork(text, links, tuple(sites))


def _link(text: str, whole: str) -> IslandLink:
    match = _LINK.fullmatch(text)
    if match is None:
        _refuse(whole, f"{text.strip()!r} is no rate and round-trip time, with units")
    rate, scale, unit, time, of = match.groups()
    if not float(rate):
        _refuse(whole, "the rate must be above 0")
    seconds = float(time) * _SECONDS[of] if time else 0.0
    return IslandLink(text.strip(), float(rate) * _SCALES[scale] / _BITS[unit], seconds)


def _refuse(text: str, why: str) -> NoReturn:
    raise ConfigError(
        f"network={text!r}: {why}; write {NETWORK_EXAMPLE!r}, or a link for every pair of sites: "
        f"{PAIRS_EXAMPLE!r}"
    )
