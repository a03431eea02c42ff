"""What the system allows."""

from replicax.doctor.limits import check_limits, judge_limits
from replicax.doctor.row import OK, WARNING


def test_this_host_has_limits() -> None:
    row = check_limits({})[0]
    assert row.verdict == OK
    assert "open files" in row.found


def test_enough_of_everything() -> None:
    (row,) = judge_limits(65536, 65536, 10**10, True, {"MALLOC_MMAP_MAX_": "0"})
    assert row.verdict == OK
    assert row.found == "65,536 open files · /dev/shm 10.0 GB · malloc MALLOC_MMAP_MAX_=0"


def test_no_limit_on_files_is_none() -> None:
    (row,) = judge_limits(-1, -1, None, False, {})
    assert row.found.startswith("any number of open files · malloc as usual")


def test_few_files() -> None:
    _, row = judge_limits(256, 4096, None, False, {})
    assert row.verdict == WARNING
    assert "256 open files" in row.found
    assert "4,096 is the most" in row.found
    assert "ulimit -n" in row.fix


def test_little_shared_memory_matters_to_gpus() -> None:
    assert len(judge_limits(1024, 1024, 64 * 10**6, False, {})) == 1
    _, row = judge_limits(1024, 1024, 64 * 10**6, True, {})
    assert row.verdict == WARNING
    assert "64 MB" in row.found
    assert "--shm-size" in row.fix
