"""A Ray cluster within this process: an actor is an object, and each of its calls a thread."""

import contextlib
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replicax.launch import on_ray, ray_actors


class LostError(Exception):
    """As Ray reports an actor that is gone."""


class FakeActor:
    """A proxy of an object, whose methods have a `remote`."""

    def __init__(self, actor: Any, options: dict[str, Any]) -> None:
        self.actor, self.options = actor, options
        self.bundle: int = options["scheduling_strategy"]
        self._calls: list[Future[Any]] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.actor, name)
        return SimpleNamespace(remote=lambda *given: self._call(method, given))

    def lose(self) -> None:
        """End it as if its worker were killed: calls fail, and the guard ends the command."""
        for call in self._calls:
            with contextlib.suppress(InvalidStateError):
                call.set_exception(LostError("Actor 5\n\tpid: 1\nleft."))
        if self.actor._loop is not None:
            self.actor._loop.send(signal.SIGKILL)

    def _call(self, method: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        call = Future[Any]()
        self._calls.append(call)
        sent = pickle.loads(pickle.dumps(given))

        def run() -> None:
            with contextlib.suppress(InvalidStateError):
                call.set_result(method(*sent))

        threading.Thread(target=run, daemon=True).start()
        return SimpleNamespace(future=lambda: call)


class FakeCluster:
    """The parts of `ray` that islands use; `actors` are all that were started."""

    exceptions = SimpleNamespace(RayError=LostError)

    def __init__(self) -> None:
        self.actors: list[FakeActor] = []
        self.bundles: list[dict[str, int]] = []
        self.refuses: BaseException | None = None
        """Raised instead of placing anything."""
        self.util = SimpleNamespace(placement_group=self._place)

    def require(self, *_: str) -> Any:
        """Stand for any module of Ray."""
        return SimpleNamespace(
            get_node_ip_address=lambda: "127.0.0.1",
            PlacementGroupSchedulingStrategy=lambda _, placement_group_bundle_index: (
                placement_group_bundle_index
            ),
        )

    def remote(self, actor: Callable[[], Any]) -> Any:
        def start(options: dict[str, Any]) -> FakeActor:
            self.actors.append(FakeActor(actor(), options))
            return self.actors[-1]

        return SimpleNamespace(
            options=lambda **options: SimpleNamespace(remote=lambda: start(options))
        )

    def get(self, asked: Any) -> Any:
        return [each.future().result() for each in asked]

    def kill(self, actor: FakeActor) -> None:
        actor.lose()

    def _place(self, bundles: list[dict[str, int]], strategy: str) -> Any:
        if self.refuses is not None:
            raise self.refuses
        assert strategy in ("SPREAD", "PACK")
        self.bundles = bundles
        return SimpleNamespace(ready=lambda: ())


def fake_cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """Return a cluster that replaces Ray, for a launcher in `folder`."""
    cluster = FakeCluster()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(ray_actors, "require", cluster.require)
    monkeypatch.setattr(on_ray, "_LAST_LINES_SECONDS", 0.0)
    return cluster
