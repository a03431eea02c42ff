"""The place of a process, as a row."""

from replicax.doctor.position import check_place
from replicax.doctor.row import OK, PROBLEM


def test_a_lone_process() -> None:
    (row,), place = check_place({})
    assert (row.verdict, row.found) == (OK, "process 0 of 1 (no launcher detected)")
    assert place is not None
    assert place.processes == 1


def test_what_was_detected_and_from_where() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node017", "MASTER_PORT": "29400"}
    (row,), place = check_place(env)
    assert row.verdict == OK
    for word in ("process 1 of 4", "RANK", "WORLD_SIZE", "node017:29400", "MASTER_ADDR"):
        assert word in row.found
    assert row.figures["reasons"]["process"] == "RANK=1"
    assert place is not None
    assert place.process == 1


def test_a_contradiction_is_a_row() -> None:
    env = {
        "REPLICAX_PROCESS_ID": "2",
        "REPLICAX_PROCESSES": "2",
        "REPLICAX_COORDINATOR": "node017:29400",
    }
    (row,), place = check_place(env)
    assert place is None
    assert row.verdict == PROBLEM
    assert "REPLICAX_PROCESS_ID=2 with REPLICAX_PROCESSES=2" in row.found
    assert row.fix == "lower it"
