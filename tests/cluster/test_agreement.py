"""All processes go on with equal fields, or none does."""

import threading
from typing import Any

import pytest
from support.cluster_jobs import Process, opened

from replicax.cluster import agreement, link
from replicax.cluster.agreement import agree
from replicax.errors import AgreementError


def test_a_lone_process_agrees_with_itself() -> None:
    assert link.current_link() is None
    agree("the run", {"steps": object()})


def outcome(fields: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each process is told; an empty text where it may go on."""
    mine = threading.local()
    monkeypatch.setattr(agreement, "current_link", lambda: mine.link)

    def run(process: Process) -> str:
        mine.link = process.link
        try:
            agree("the run", fields[process.process])
        except AgreementError as error:
            process.link.part()
            return str(error)
        return ""

    with opened(len(fields)) as job:
        processes = job.start()
        told = [future.result(5.0) for future in [job.call(run, p) for p in processes]]
        assert not any(process.stopped.done() for process in processes)  # nobody is blamed
    return told


def test_equal_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"steps": 10, "model": {"layers": (4, 2)}, "path": __file__}
    assert outcome([fields, dict(reversed(fields.items()))], monkeypatch) == ["", ""]


def test_a_tuple_equals_a_list_as_json_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome([{"a": (1, 2)}, {"a": [1, 2]}], monkeypatch) == ["", ""]


def test_all_are_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    told = outcome([{"steps": 10}, {"steps": 10}, {"steps": 12}], monkeypatch)
    assert (
        told
        == [
            "the processes disagree on the run: steps is 12 on process 2, 10 on processes 0 and 1: "
            "start all with the same code, data and arguments"
        ]
        * 3
    )


def test_the_first_few_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    told = outcome([{f"f{n}": p for n in range(9)} for p in range(2)], monkeypatch)
    assert all("f2 is 1 on process 1, 0 on process 0; and 6 more: start" in text for text in told)
    assert "f3" not in told[0]


def test_where_an_object_lies_in_memory_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = object(), object()
    assert outcome([{"a": here}, {"a": there}], monkeypatch) == ["", ""]
