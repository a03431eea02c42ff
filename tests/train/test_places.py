"""Places to save a run: what folders and object stores share, and the lease in them."""

import os
from pathlib import Path

import pytest
from support.lease_starts import move, refused
from support.object_store import Objects, register

from replicax.errors import ConfigError, MissingDependencyError, RunInUseError
from replicax.train.files import lease
from replicax.train.files.lease import take_lease
from replicax.train.files.places import (
    is_remote,
    names,
    place,
    read_touched,
    remove,
    remove_below,
    shown,
    touch,
    write_whole,
)


@pytest.fixture
def objects(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    return register(tmp_path_factory.mktemp("objects"))


@pytest.fixture(params=["folder", "object store"])
def where(request: pytest.FixtureRequest, tmp_path: Path, objects: Objects) -> Path:
    """Return an empty place of either kind."""
    return tmp_path if request.param == "folder" else place("s3://bucket/runs/x")


def test_a_url_is_told_from_a_folder(objects: Objects) -> None:
    assert place("runs/x") == Path.cwd() / "runs/x"
    assert not is_remote(place(Path("/runs/x")))
    for url in ("s3://bucket/runs/x", "gs://bucket/x"):
        assert is_remote(place(url))
        assert os.fspath(place(url) / "lease") == f"{url}/lease"
    with pytest.raises(ConfigError, match=r"^http://host/x .*object store"):
        place("http://host/x")


@pytest.mark.promise("outside.places-of-runs")
def test_a_folder_is_absolute_and_tilde_is_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert place("~/x") == Path("/home/someone/x")
    assert place("$HOME/x") == Path.cwd() / "$HOME/x"
    assert shown(place("runs/x")) == "runs/x"
    assert shown(place("/elsewhere/x")) == "/elsewhere/x"
    for given in ("", "~no-such-user/x"):
        with pytest.raises(ConfigError) as refused:
            place(given)
        assert len(str(refused.value).splitlines()) == 1


def test_files_are_written_whole_listed_and_removed(where: Path) -> None:
    assert names(where) == []
    for name, data in (("a", b"one"), ("b", b"two"), ("a", b"three")):
        write_whole(where / name, data)
    assert sorted(names(where)) == ["a", "b"]
    assert read_touched(where / "a")[0] == b"three"
    remove(where / "a")
    remove(where / "none")
    assert names(where) == ["b"]
    with pytest.raises(FileNotFoundError):
        read_touched(where / "a")


def test_a_touch_is_seen_and_makes_nothing(where: Path) -> None:
    write_whole(where / "a", b"{}")
    content, before = read_touched(where / "a")
    touch(where / "a")
    now, after = read_touched(where / "a")
    assert before != after
    assert now.strip() == content
    with pytest.raises(FileNotFoundError):
        touch(where / "none")
    assert names(where) == ["a"]


def test_what_others_write_is_listed(objects: Objects) -> None:
    """Clients remember what they listed."""
    folder = place("s3://bucket/x")
    write_whole(folder / "a", b"")
    assert names(folder) == ["a"]
    (objects.root / "bucket%2Fx%2Fb").write_bytes(b"")  # by another process
    assert [each.name for each in folder.iterdir()] == ["a"]
    assert names(folder) == ["a", "b"]


def test_what_fails_in_a_client_is_an_os_error(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("503: slow down\nplease")

    monkeypatch.setattr(Objects, "ls", broken)
    with pytest.raises(OSError, match="RuntimeError: 503: slow down") as failed:
        names(place("s3://bucket/x"))
    assert "please" not in str(failed.value)
    with pytest.raises(ConfigError, match=r"written \(RuntimeError: 503: slow down\)"):
        take_lease(place("s3://bucket/x"))


def test_a_client_that_is_not_installed_is_not_a_folder_to_make_writable(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_: object, **__: object) -> None:
        raise ImportError("Please install gcsfs")

    monkeypatch.setattr(Objects, "ls", absent)
    with pytest.raises(MissingDependencyError, match="gcsfs") as failed:
        take_lease(place("s3://bucket/x"))
    assert "writable" not in str(failed.value)


def test_a_link_to_no_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"/run\b.*/gone\b"):
        take_lease(tmp_path / "run")


def test_what_a_client_does_not_find_is_not_there(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NotFoundError(Exception):
        """As TensorFlow's, which etils uses where it is installed."""

    def missing(*_: object, **__: object) -> None:
        raise NotFoundError("no such object")

    monkeypatch.setattr(Objects, "ls", missing)
    assert names(place("s3://bucket/x")) == []


# The lease, without locks, links, renames or times


def test_a_run_in_an_object_store_is_held_by_one(objects: Objects) -> None:
    run = place("s3://bucket/runs/x")
    with take_lease(run) as taken:
        taken.check()
        assert f"pid {os.getpid()}" in refused(run)
        taken.check()
    with take_lease(run) as again:
        assert again.token == 2
    remove_below(run)
    with pytest.raises(RunInUseError, match="replaced"):
        again.check()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("lives", [True, False])
def test_heartbeats_are_seen_in_an_object_store(
    objects: Objects, monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    run = place("s3://bucket/runs/x")
    if not lives:
        monkeypatch.setattr(lease.Lease, "_renew", lambda self: None)
    first = take_lease(run)
    move(monkeypatch)
    if lives:
        refused(run)
    else:
        with take_lease(run) as second:
            assert second.token == 2
            with pytest.raises(RunInUseError, match="start 2, host other-host"):
                first.check()
    first.release()


def test_a_path_that_no_file_could_name_is_one_line() -> None:
    for path in ("runs/\udcff", "runs/a\0b"):
        with pytest.raises(ConfigError) as caught:
            place(path)
        assert str(caught.value).isprintable()
