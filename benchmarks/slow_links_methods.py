"""The methods that slow_links.py compares, by name."""

import dataclasses

from replicax.core.between.rounds import Rounds

_STEPS = 3
"""Steps measured at once of a method that exchanges in every one."""


@dataclasses.dataclass(frozen=True)
class LinkMethod:
    """How often islands exchange, and in which form."""

    name: str
    schedule: Rounds

    @property
    def rounds(self) -> Rounds | None:
        """The argument of `DataParallel`; None for sums of every step in float32."""
        is_plain = self.schedule.sends_gradients and self.schedule.codec.name == "float32"
        return None if is_plain else self.schedule

    @property
    def measured_steps(self) -> int:
        """Steps of one measurement: a whole round, so that each fragment is sent once."""
        return _STEPS if self.schedule.every == 1 else self.schedule.every

    @property
    def steps_before(self) -> int:
        """Steps before a measurement, until what is under way then is as it will be at its end."""
        return self.schedule.interval if self.schedule.delay else 1

    @property
    def own_work(self) -> "LinkMethod":
        """The method with an exchange in every second step at most, to time what an island does."""
        if self.schedule.every == 1:
            return self
        often = {"every": 2 * self.schedule.fragments, "delay": 0}
        return dataclasses.replace(self, schedule=dataclasses.replace(self.schedule, **often))


def link_methods(every: int) -> dict[str, LinkMethod]:
    """Return the methods by name, with rounds of so many steps."""
    fragments = next((count for count in (5, 3, 2) if every % count == 0), 1)
    schedules = {
        "float32": Rounds(every=1),
        "int4": Rounds(every=1, send="int4"),
        "rounds-float32": Rounds(every=every),
        "rounds-int4": Rounds(every=every, send="int4"),
        "rounds-sparse": Rounds(every=every, send="sparse"),
        "streamed-int4": Rounds(
            every=every, send="int4", fragments=fragments, delay=min(5, every // fragments - 1)
        ),
    }
    return {name: LinkMethod(name, schedule) for name, schedule in schedules.items()}


METHOD_NAMES = tuple(link_methods(30))
