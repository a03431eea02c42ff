"""Audits between islands: who is outvoted leaves, and names the leaf; the others go on."""

import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from launch.launching import environment, run
from support.bit_flips import flip_leaf
from support.figures import assert_mentions
from support.island_networks import connected, places
from support.processes import SUPPORT

import replicax as rx
from replicax.cluster.watchdog import Timeouts
from replicax.core.ground.job import Alone
from replicax.errors import IslandLeftError, ReplicasDifferError
from replicax.islands.group import Group
from replicax.islands.island_job import IslandJob
from replicax.train.files.fingerprint import Fingerprint
from replicax.train.hooks.island_audit import IslandAudit, IslandVerdict, judge_islands

LEAVES = ["w", "b"]


@pytest.mark.parametrize(
    ("checksums", "verdict"),
    [
        ({0: "aa", 1: "aa", 2: "aa"}, None),
        ({4: "aa"}, None),
        ({0: "aa", 1: "ab", 2: "aa"}, IslandVerdict((1,), ("b",), True)),
        ({0: "xy", 1: "aa", 2: "aa"}, IslandVerdict((0,), ("w", "b"), True)),
        ({0: "aa", 5: "ba"}, IslandVerdict((0, 5), ("w",), False)),
        ({0: "aa", 1: "aa", 2: "ba", 3: "ba"}, IslandVerdict((0, 1, 2, 3), ("w",), False)),
        ({0: "aa", 1: "ba", 2: "ca"}, IslandVerdict((0, 1, 2), ("w",), False)),
        ({0: "aa", 1: "aa", 2: "a-", 3: "a-", 4: "aa"}, IslandVerdict((2, 3), ("b",), True)),
        ({0: "-a", 1: "-a", 2: "-a"}, IslandVerdict((0, 1, 2), ("w",), False)),
        ({3: "a-"}, IslandVerdict((3,), ("b",), False)),
    ],
)
def test_verdicts(checksums: dict[int, str], verdict: IslandVerdict | None) -> None:
    """A letter is the checksum of a leaf; `-` if an island's own devices differ in it."""
    given = {island: [x.strip("-") for x in each] for island, each in checksums.items()}
    assert judge_islands(given, LEAVES) == verdict


class Inner(Alone):
    """The job of the one process of an island."""

    place = None

    def agree_on_text(self, topic: str, text: str) -> None: ...


def state(devices: int, sharded: bool = False) -> dict[str, jax.Array]:
    mesh = rx.make_mesh(devices, devices=jax.devices()[:devices])
    where = NamedSharding(mesh, PartitionSpec("data") if sharded else PartitionSpec())
    values = {"b": np.arange(4, dtype=np.float32), "w": np.ones((8, 2), np.float32)}
    return {name: jax.device_put(value, where) for name, value in values.items()}


def flipped(given: dict[str, jax.Array], leaf: int = 1) -> Any:
    return flip_leaf(given, leaf, jax.devices()[0], 2, 3)


def audited(*states: Any, shards: bool = False) -> list[str | Exception | None]:
    """Return what islands with these states find after step 10."""
    groups = [Group(place, Timeouts()) for place in places(len(states))]

    connected(len(groups), [group.network for group in groups])

    def found(group: Group, own: Any) -> str | Exception | None:
        job = IslandJob(Inner(), group.place, group)  # type: ignore[arg-type]
        group.enter({}, has_state=True)
        fingerprint = Fingerprint(own)
        try:
            audit = IslandAudit(job, fingerprint, shards=shards)
            return audit.compare(own, fingerprint.take(own), 10)
        except (IslandLeftError, ReplicasDifferError) as error:
            return error

    try:
        with ThreadPoolExecutor(len(groups)) as threads:
            return list(threads.map(found, groups, states))
    finally:
        for group in groups:
            group.finish()


def test_equal_states_are_clean_on_any_number_of_devices() -> None:
    assert audited(state(1), state(2), state(1)) == [None] * 3
    sharded = [state(devices, sharded=True) for devices in (1, 2, 4)]
    assert audited(*sharded, shards=True) == [None] * 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: flipped(state(1)),
        lambda: flipped(state(2)),  # on one of its two devices
        lambda: flipped(state(2, sharded=True)),
    ],
    ids=["one device", "two devices", "sharded"],
)
def test_the_outvoted_island_leaves(make: Callable[[], Any]) -> None:
    one, two, three = audited(state(1), make(), state(1), shards=True)
    assert isinstance(two, IslandLeftError)
    assert (two.exit_code, two.is_sound) == (75, False)
    assert_mentions(str(two), "island 1", "['w']", "step 10", "2 of 3")
    assert "['b']" not in str(two)
    for line in (one, three):
        assert isinstance(line, str)
        assert_mentions(line, "island 1", "['w']", "step 10", "2 of 3")


def test_without_a_majority_all_stop() -> None:
    for found in audited(state(1), flipped(state(1), 0)):
        assert isinstance(found, ReplicasDifferError)
        assert_mentions(str(found), "island 0 and island 1", "['b']", "step 10")


@pytest.mark.exhaustive
@pytest.mark.parametrize("wrong", [0, 2], ids=["the one that writes", "another"])
def test_an_island_with_a_flipped_bit_leaves_and_receives_the_state(
    wrong: int, tmp_path: Path
) -> None:
    """The end is that of a run whose islands were never wrong."""
    ends = {}
    paths = [str(SUPPORT.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = environment(JAX_PLATFORMS="cpu", PYTHONPATH=os.pathsep.join(paths))
    for name, faulty in (("right", -1), ("flipped", wrong)):
        folder = tmp_path / name
        folder.mkdir()
        command = [sys.executable, str(SUPPORT / "job_island_audit.py"), str(folder), str(faulty)]
        outcome = run(command, 1, folder, islands=3, restarts=20, env=env)
        assert (outcome.exit_code, outcome.message) == (0, None)
        assert outcome.attempts == (1 if faulty < 0 else 2)
        texts = [path.read_text() for path in sorted(folder.glob("island-?.log"))]
        ends[name] = [re.findall(r"^weights (\w+)", text, re.MULTILINE) for text in texts]
        if faulty >= 0:
            assert_mentions(texts[faulty], f"island {faulty}", "params", "2 of 3")
            again = (folder / f"island-{faulty}-attempt-2.log").read_text()
            ends[name][faulty] = re.findall(r"^weights (\w+)", again, re.MULTILINE)
    assert len({weights for each in ends.values() for (weights,) in each}) == 1
