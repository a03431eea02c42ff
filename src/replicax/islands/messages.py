"""Messages between islands: typed JSON arrays, checked on receipt and never executed.

Each pair of islands has two connections. `Beat` and the messages of the protocol travel on the
control connection, `Frame` headers, each followed by its arrays, on the data connection.
"""

from collections.abc import Sequence

import msgspec

from replicax.net.message import Typed
from replicax.net.proof import Proof, Refusal

# The handshake: a Greeting of each side, then a Proof of each; either side may refuse.


class Greeting(Typed):
    """The first message of each side: who it is."""

    job: str
    island: int
    """Index of the sender, from 0."""
    islands: int
    start: str
    """Random text that differs in each start of an island."""
    purpose: str
    """`control`, `data`, or `inquiry` of `replicax doctor`; empty in the answer."""
    nonce: str
    host: str = ""
    boot: str = ""
    """Identifies the running system of `host`, and its process ids; empty if unknown."""
    pid: int = 0


class Question(Typed):
    """A question of `replicax doctor`, on a connection of its own."""

    bytes: int = 0
    """Number of bytes that follow, and are received before the answer."""


class Answer(Typed):
    """The answer to `Question`."""

    time: float
    """Seconds since 1970."""
    trains: bool
    """Whether the sender is an island of a program, and not `replicax doctor`."""


class Beat(Typed):
    """A heartbeat."""

    rests: bool = False
    """Whether the sender waits for something else, such as a disk: no progress is expected."""
    moves: int = 0
    """Number of times that the sender made progress, such as by a step."""


# The protocol, on the control connection.


class View(Typed):
    """The islands that compute together from one exchange on, until the next view."""

    number: int
    members: Sequence[tuple[int, str]]
    """Index and start of each live island, in the order in which they joined."""
    confirmed: Sequence[int]
    """Indices of the members that are known to hold the state."""
    exchange: int
    """The first exchange of this view."""
    kept: Sequence[Sequence[int]] = ()
    """For each member, the parts of the first exchange that it had computed in the view before."""


class Ready(Typed):
    """The sender has compiled the step and asks to become a member."""

    fields: str
    """In JSON: what must be equal in all islands."""
    sees: Sequence[int] = ()
    """Indices of the islands to which the sender is connected."""


class InView(Typed):
    """The sender is a member of this view."""

    view: View


class Have(Typed):
    """The sender has the sums of all members."""

    view: int
    exchange: int


class Suspect(Typed):
    """The sender no longer hears the members `suspected` of a view."""

    view: View
    suspected: Sequence[int]
    """Indices, sorted."""
    committed: int
    """The last exchange that the sender has completed."""
    parts: Sequence[int]
    """Parts of the next exchange that it has computed."""


class Decided(Typed):
    """All survivors of view `before` agreed on the view after it."""

    before: int
    after: View
    committed: int
    """The last exchange that is complete."""


class GoOn(Typed):
    """The first member of a view has found that its members may go on without those they lost."""

    view: int


class Out(Typed):
    """The receiver is no longer a member, or cannot become one."""

    reason: str
    is_final: bool = False
    """Whether asking again is useless."""


class Done(Typed):
    """The sender has completed the run, and leaves."""

    view: int = -1
    """The view in which it completed its last exchange; -1 if it completed none."""
    exchange: int = -1
    """The last exchange that it has completed."""


Control = Beat | Ready | InView | Have | Suspect | Decided | GoOn | Out | Done


class Frame(Typed):
    """The header of arrays on the data connection."""

    view: int
    exchange: int
    blocks: Sequence[tuple[int, int]]
    """First part and number of parts of each block, whose sum the arrays are, block by block."""
    note: str
    """A JSON value of the sender for all members."""
    same: str = "{}"
    """In JSON: what must be equal in the frames of all members, such as the batch."""
    admits: bool = False
    """Whether islands may join after this exchange."""
    ready: Sequence[tuple[int, str]] = ()
    """Index and start of the islands that asked the sender to join."""
    arrays: Sequence[tuple[str, Sequence[int]]] = ()
    """NumPy dtype name and shape of each array that follows, in row-major order."""
    crc: int = 0
    """`zlib.crc32` of the bytes of all arrays."""


class State(Typed):
    """The header of the state that a member gives to a new one."""

    view: View
    exchange: int
    """The exchange that is next."""
    sha256: str
    """SHA-256 of the arrays. The bytes of the first are JSON: the run, and where it is."""
    arrays: Sequence[tuple[str, Sequence[int]]] = ()
    crc: int = 0


Data = Frame | State

CONTROL_DECODER: msgspec.json.Decoder[Control] = msgspec.json.Decoder(Control)
DATA: msgspec.json.Decoder[Data] = msgspec.json.Decoder(Data)
INQUIRY: msgspec.json.Decoder[Question | Answer] = msgspec.json.Decoder(Question | Answer)
HANDSHAKE: msgspec.json.Decoder[Greeting | Proof | Refusal] = msgspec.json.Decoder(
    Greeting | Proof | Refusal
)
