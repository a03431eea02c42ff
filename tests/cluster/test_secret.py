"""A process with the job's secret may join; a process without it learns nothing."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from support.cluster_jobs import opened
from support.waiting import HANG_SECONDS

from replicax.cluster.place import find_place
from replicax.cluster.wire import Hello, Prove
from replicax.errors import ClusterError, ConfigError
from replicax.net.message import encode
from replicax.net.proof import DIALS, LISTENS, Proof, check_proof, proof
from replicax.net.secret import Secret, find_secret

KEY = "the secret of this job"
SECRET, OTHER = Secret(KEY.encode()), Secret(b"another")
ENV = {"REPLICAX_PROCESS_ID": "1", "REPLICAX_PROCESSES": "2", "REPLICAX_COORDINATOR": "a:1"}


def same(one: Secret, other: Secret) -> bool:
    return one.hmac(b"text") == other.hmac(b"text")


def test_a_secret_in_the_environment_or_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{KEY}\n")
    for env in ({"REPLICAX_SECRET": KEY}, {"REPLICAX_SECRET_FILE": str(file)}):
        assert same(find_secret(env), SECRET)
        assert same(find_place({**ENV, **env}).secret, SECRET)
    assert same(find_secret({}), Secret())
    assert not same(find_secret({}), SECRET)
    assert (SECRET.is_set, find_secret({}).is_set) == (True, False)


def test_a_proof_holds_for_one_connection_of_one_rank_of_one_job() -> None:
    def proven(role: str = DIALS, to: str = "m", **fields: Any) -> Proof:
        told = {"job": "a", "process": 1, "processes": 2, "nonce": "n", **fields}
        return proof(SECRET, role, Hello(**told), Prove(to))

    check_proof(proven(), proven())
    changes = {"job": "b", "process": 0, "processes": 3, "nonce": "o", "role": LISTENS, "to": "o"}
    others = [proven(**{name: value}) for name, value in changes.items()]
    for wrong in (*others, Proof("ä"), Proof("")):
        with pytest.raises(ValueError, match="secret"):
            check_proof(wrong, proven())


def test_a_secret_that_cannot_be_used_is_named_but_not_shown(tmp_path: Path) -> None:
    pipe, empty, large = tmp_path / "pipe", tmp_path / "empty", tmp_path / "large"
    os.mkfifo(pipe)
    empty.touch()
    large.write_text(KEY * 1000)
    for wrong in (pipe, empty, large, tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=re.escape(str(wrong))) as caught:
            find_secret({"REPLICAX_SECRET_FILE": str(wrong)})
        assert KEY not in str(caught.value)
    with pytest.raises(ConfigError, match="REPLICAX_SECRET is empty"):
        find_secret({"REPLICAX_SECRET": " "})
    with pytest.raises(ConfigError, match="both") as caught:
        find_secret({"REPLICAX_SECRET": KEY, "REPLICAX_SECRET_FILE": "x"})
    assert KEY not in str(caught.value)


def test_neither_a_place_nor_a_message_shows_the_secret() -> None:
    found = find_place({**ENV, "REPLICAX_SECRET": KEY})
    assert KEY not in f"{found!r} {found.line()} {found.reasons} {vars(found)}"
    assert KEY.encode() not in encode(proof(SECRET, DIALS, Hello("ours", 1, 2), Prove("")))


@pytest.mark.promise("outside.secret")
@pytest.mark.parametrize("wrong", [OTHER, Secret()], ids=["another", "none"])
def test_a_process_without_the_secret_neither_joins_nor_disturbs(
    wrong: Secret,
) -> None:
    with opened(2, secret=SECRET) as job:
        processes = job.start()
        for process in (0, 1):
            with pytest.raises(ClusterError, match="REPLICAX_SECRET") as caught:
                job.come(process, secret=wrong).result(timeout=HANG_SECONDS)
            assert "secret" in str(caught.value)
            assert "differs" in str(caught.value)
            assert "ours" not in str(caught.value)
        assert job.works(processes)
