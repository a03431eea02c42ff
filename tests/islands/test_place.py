"""The place of an island, from the environment."""

from pathlib import Path

import pytest

from replicax.errors import ConfigError
from replicax.islands.island_place import IslandPlace, find_island
from replicax.net.secret import Secret

KEY = "the secret of this job"
ENV = {
    "REPLICAX_ISLAND": "1",
    "REPLICAX_ISLANDS": "a:1, b:2,[::1]:3",
    "REPLICAX_JOB_ID": "ours",
    "REPLICAX_SECRET": KEY,
}


def test_all_parts_are_read(tmp_path: Path) -> None:
    found = find_island(ENV)
    assert found == IslandPlace(1, ("a:1", "b:2", "[::1]:3"), "ours", Secret(KEY.encode()))
    assert found is not None
    assert found.secret.hmac(b"x") == Secret(KEY.encode()).hmac(b"x") != Secret(b"y").hmac(b"x")
    assert KEY not in repr(found)
    (tmp_path / "secret").write_text(KEY)
    file = {**ENV, "REPLICAX_SECRET": "", "REPLICAX_SECRET_FILE": str(tmp_path / "secret")}
    del file["REPLICAX_SECRET"]
    assert find_island(file) == found
    alone = find_island({**ENV, "REPLICAX_ISLAND": "0", "REPLICAX_ISLANDS": "a:1"})
    assert alone is not None
    assert alone.addresses == ("a:1",)


def test_a_job_needs_no_id_and_one_of_any_bytes_can_be_sent() -> None:
    without = {name: value for name, value in ENV.items() if name != "REPLICAX_JOB_ID"}
    for env, job in ((without, ""), ({**ENV, "REPLICAX_JOB_ID": "\udcff"}, "\\udcff")):
        found = find_island(env)
        assert found is not None
        assert found.job == job


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"REPLICAX_ISLAND": None}, r"set REPLICAX_ISLAND$"),
        ({"REPLICAX_ISLANDS": None}, r"set REPLICAX_ISLANDS$"),
        ({"REPLICAX_SECRET": None}, r"REPLICAX_SECRET "),
        ({"REPLICAX_ISLAND": "3"}, r"REPLICAX_ISLAND=3 .* 3 .* 0 to 2"),
        ({"REPLICAX_ISLAND": "-1"}, r"'-1'"),
        ({"REPLICAX_ISLAND": "one"}, r"'one'"),
        ({"REPLICAX_ISLANDS": ""}, r"REPLICAX_ISLANDS=''"),
        ({"REPLICAX_ISLANDS": "a:1,b"}, r"'b'"),
        ({"REPLICAX_ISLANDS": "a:1,b:2,"}, r"REPLICAX_ISLANDS=''"),
        ({"REPLICAX_ISLANDS": "a:1,b:70000"}, r"70000"),
        ({"REPLICAX_ISLANDS": "a:1,::1:3"}, r"::1:3"),
        ({"REPLICAX_ISLANDS": "a:1,b:2,a:1"}, r"a:1 2 "),
        ({"REPLICAX_ISLANDS": "a:1,b:2,a:01"}, r"a:1 2 "),
        ({"REPLICAX_JOB_ID": "j" * 257}, r"257 .* 256"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, str | None], named: str) -> None:
    env = {name: value for name, value in {**ENV, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=named) as caught:
        find_island(env)
    assert KEY not in str(caught.value)
    assert "\n" not in str(caught.value)
