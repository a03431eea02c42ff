"""Kinds of fault: each disturbs a trial while it runs; `Trial.finish` then waits for its end."""

import dataclasses
from collections.abc import Callable, Sequence

from chaos.islands import deaths, link_faults, outside, stalls
from chaos.islands.sizes import PATIENCE_SECONDS
from chaos.islands.trial import Trial

_PATIENT = {"REPLICAX_SILENT_SECONDS": f"{PATIENCE_SECONDS:g}"}


@dataclasses.dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Args:
        what: as the table says it.
        inject: disturbs a trial that has begun.
        islands: numbers of islands that it may have, each as often as it is here.
        env: of the islands.
        linked: whether the islands reach each other through a proxy.
        quiet: whether no island may end early.
        disk: whether the run has a small disk of its own.
        launched: the processes of each island that `replicax launch` starts; 0: it does not.
        codes: exit codes that an island may have, besides 0 and 75.
        resumes: whether all islands end together and resume, so that rounds have the usual bits.
    """

    what: str
    inject: Callable[[Trial], None]
    islands: Sequence[int] = (3, 3, 4)
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    linked: bool = False
    quiet: bool = False
    disk: bool = False
    launched: int = 0
    codes: Sequence[int] = ()
    resumes: bool = False


THREE = (3,)
FAULTS = {
    "kill": Fault("kill -9 of one at any time", deaths.kill),
    "kill-two": Fault("kill -9 of two at once", deaths.kill_two),
    "kill-others": Fault("kill -9 of all but one", deaths.kill_others),
    "kill-all": Fault("kill -9 of all", deaths.kill_all),
    "kill-many": Fault("kill -9 again and again", deaths.kill_many),
    "kill-unproven": Fault(
        "kill -9 of 1 to n-1 on other hosts", deaths.kill_unproven, env={"CHAOS_HOSTS": "1"}
    ),
    "kill-saving": Fault("kill -9 while saving", deaths.kill_saving, env={"CHAOS_SAVE_EVERY": "3"}),
    "kill-sending": Fault("kill -9 between two bytes", link_faults.kill_sending, linked=True),
    "kill-joining": Fault("kill -9 while one joins", deaths.kill_joining),
    "fresh-left": Fault("kill -9 of all but a joiner", deaths.fresh_left),
    "term": Fault("SIGTERM to one or all", deaths.term),
    "freeze": Fault("SIGSTOP beyond the patience", stalls.freeze, env=_PATIENT),
    "freeze-short": Fault(
        "SIGSTOP within the patience", stalls.freeze_short, env=_PATIENT, quiet=True
    ),
    "slow": Fault("SIGSTOP in short pulses", stalls.slow, env=_PATIENT, quiet=True),
    "partition": Fault("nothing gets through", link_faults.partition, env=_PATIENT, linked=True),
    "halves": Fault(
        "2|2 or 1|2 divided for long", link_faults.halves, (4, 4, 3), _PATIENT, linked=True
    ),
    "cut": Fault("connections cut at any byte", link_faults.cut, linked=True),
    "corrupt": Fault("a bit flipped on its way", link_faults.corrupt, env=_PATIENT, linked=True),
    "slow-link": Fault("slow connections", link_faults.slow_link, linked=True, quiet=True),
    "strangers": Fault("strangers at the ports", outside.strangers, quiet=True),
    "disk-full": Fault(
        "disk full, perhaps a death",
        outside.disk_full,
        env={"CHAOS_SAVE_EVERY": "3"},
        disk=True,
        codes=(1,),  # after three saves that failed a run stops, as without islands
    ),
    "launch": Fault(
        "kill -9 under replicax launch",
        deaths.launched,
        THREE,
        {"CHAOS_STEP_SECONDS": "0.1"},  # its starts import everything anew
        launched=1,
    ),
    "several": Fault(
        "the same, islands of two processes",
        deaths.launched,
        (2,),
        {"CHAOS_STEP_SECONDS": "0.1"},
        launched=2,
    ),
}
