"""The place of this island among the islands of its job."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from replicax.cluster.variables import JOB_ID, whole_number
from replicax.errors import ConfigError
from replicax.islands.island_variables import ISLAND, ISLANDS
from replicax.net.address import join_address, split_address
from replicax.net.secret import SECRET, SECRET_FILE, Secret, find_secret

_LONGEST_JOB = 256
"""Characters of a job ID, so that the first message of a handshake stays short."""


@dataclass(frozen=True)
class IslandPlace:
    """The place of an island; `ConfigError` if its parts do not fit together."""

    index: int
    """Index of this island, from 0."""
    addresses: tuple[str, ...]
    """`host:port` of each island, by index."""
    job: str
    """The job ID; `""` if unknown."""
    secret: Secret = field(repr=False, compare=False)
    """Proof that an island belongs to the job; every pair of islands needs it."""

    @property
    def others(self) -> set[int]:
        """Indices of all other islands."""
        return {*range(len(self.addresses))} - {self.index}

    def __post_init__(self) -> None:
        spelled = [join_address(*split_address(address, ISLANDS)) for address in self.addresses]
        twice = [address for address in spelled if spelled.count(address) > 1]
        if twice:
            raise ConfigError(
                f"{ISLANDS} names {twice[0]} {spelled.count(twice[0])} times; each island listens "
                "on its own address: change one"
            )
        if not 0 <= self.index < len(spelled):
            raise ConfigError(
                f"{ISLAND}={self.index} with {len(spelled)} addresses in {ISLANDS}; indices range "
                f"from 0 to {len(spelled) - 1}: correct one of the two"
            )
        if not self.secret.is_set:
            raise ConfigError(
                f"{ISLANDS} without {SECRET} or {SECRET_FILE}; islands accept only those that know "
                "the job's secret: give all islands the same"
            )
        if len(self.job) > _LONGEST_JOB:
            raise ConfigError(
                f"{JOB_ID} has {len(self.job)} characters; islands allow {_LONGEST_JOB}: shorten it"
            )


def find_island(env: Mapping[str, str]) -> IslandPlace | None:
    """Return the place that the environment defines; None if it defines no islands.

    `ConfigError` if a variable is missing or malformed.
    """
    if ISLAND not in env and ISLANDS not in env:
        return None
    for name, other in ((ISLAND, ISLANDS), (ISLANDS, ISLAND)):
        if name not in env:
            raise ConfigError(f"{other} is set without {name}; islands need both: set {name}")
    index = whole_number(env[ISLAND], ISLAND)
    addresses = tuple(address.strip() for address in env[ISLANDS].split(","))
    # Bytes that are no UTF-8 cannot be sent as text.
    job = env.get(JOB_ID, "").encode(errors="backslashreplace").decode()
    return IslandPlace(index, addresses, job, find_secret(env))
