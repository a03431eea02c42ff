"""The methods that `bench --network` compares, by name, and what an exchange of each sends."""

import dataclasses

from replicax.core.between.islands import Islands
from replicax.core.ground.codecs import CODECS
from replicax.errors import choose

ENDLESS_STEPS = 1_000_000_000
"""Steps of a round that does not end while it is measured."""
_STEPS = 3
"""Steps measured at once of a method that exchanges in every one."""


@dataclasses.dataclass(frozen=True)
class LinkMethod:
    """How often islands exchange, and in which form."""

    name: str
    send: str
    every: int = 1
    fragments: int = 1
    delay: int = 0

    @property
    def islands(self) -> Islands | None:
        """The settings of `DataParallel`; None for sums of every step in float32."""
        if self.every == 1 and self.send == "float32":
            return None
        return Islands(every=self.every, send=self.send, fragments=self.fragments, delay=self.delay)

    @property
    def measured_steps(self) -> int:
        """Steps of one measurement: a whole round, so that each fragment is sent once."""
        return _STEPS if self.every == 1 else self.every

    @property
    def steps_before(self) -> int:
        """Steps before a measurement, until what is under way then is as it will be at its end."""
        return self.interval if self.delay else 1

    @property
    def interval(self) -> int:
        """Steps between two exchanges."""
        return self.every // self.fragments

    @property
    def own_work(self) -> "LinkMethod":
        """The method with an exchange in every second step at most, to time what an island does."""
        if self.every == 1:
            return self
        return dataclasses.replace(self, every=2 * self.fragments, delay=0)

    def bytes_per_step(self, parameters: int, islands: int) -> float:
        """Return the bytes that an island sends in a step, without the headers of its frames."""
        codec = choose("send", self.send, CODECS)
        fragment = codec.payload_bytes(-(-parameters // self.fragments))
        return (islands - 1) * self.fragments * fragment / self.every


def link_methods(every: int) -> dict[str, LinkMethod]:
    """Return the methods by name, with rounds of so many steps."""
    fragments = next((count for count in (5, 3, 2) if every % count == 0), 1)
    delay = min(5, every // fragments - 1)
    found = (
        LinkMethod("float32", "float32"),
        LinkMethod("int4", "int4"),
        LinkMethod("rounds-float32", "float32", every),
        LinkMethod("rounds-int4", "int4", every),
        LinkMethod("rounds-sparse", "sparse", every),
        LinkMethod("streamed-int4", "int4", every, fragments, delay),
    )
    return {method.name: method for method in found}


METHOD_NAMES = tuple(link_methods(30))
