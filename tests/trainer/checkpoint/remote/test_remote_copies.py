"""Checkpoints at an address: what is sent, what comes back, and what a failing object store does to both."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.object_store import Fault, ObjectStore, s3_server
from trainer.checkpoint.disk_tier.manifest import CheckpointError, digest_file, read_manifest, write_manifest
from trainer.checkpoint.remote.address import RemoteError, RemoteFolder
from trainer.checkpoint.remote.copies import RemoteCopies


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with s3_server() as started:
        yield started


@pytest.fixture
def store(server: ObjectStore) -> Iterator[ObjectStore]:
    yield server
    server.faults.clear()
    for key in server.names():
        server.client().delete_object(Bucket=server.bucket, Key=key)


def make_checkpoint(checkpoints: Path, step: int, parts: dict[str, bytes]) -> Path:
    """A finished checkpoint folder with these files."""
    folder = checkpoints / f"step-{step:08d}"
    folder.mkdir(parents=True)
    for name, content in parts.items():
        (folder / name).write_bytes(content)
    write_manifest(folder, {"step": step}, {name: digest_file(folder / name) for name in parts})
    return folder


def content(seed: int, size: int = 200_000) -> bytes:
    return random.Random(seed).randbytes(size)


def copies_at(store: ObjectStore, *, tries: int = 4) -> RemoteCopies:
    """The run's checkpoints at the store, without waits between tries."""
    copies = RemoteCopies(RemoteFolder(f"s3://{store.bucket}/runs/gpt", tries=tries, wait=lambda seconds: None))
    copies.open()
    return copies


def same_files(one: Path, other: Path) -> bool:
    return {path.name: path.read_bytes() for path in one.iterdir()} == {
        path.name: path.read_bytes() for path in other.iterdir()
    }


def test_what_comes_back_is_what_was_sent(store: ObjectStore, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "here", 50, {"__0_0.distcp": content(1), ".metadata": b"plan"})
    copies_at(store).publish(folder)
    again = copies_at(store)
    assert again.steps == [50]
    assert same_files(again.fetch(50, tmp_path / "there"), folder)
    assert not list((tmp_path / "there").glob("*.tmp"))


def test_unchanged_files_are_sent_once_and_outlive_the_first_checkpoint_that_has_them(
    store: ObjectStore, tmp_path: Path
) -> None:
    frozen = content(1)
    first = make_checkpoint(tmp_path, 10, {"frozen": frozen, "trained": content(2, 1000)})
    second = make_checkpoint(tmp_path, 20, {"frozen": frozen, "trained": content(3, 1000)})
    copies = copies_at(store)
    assert copies.publish(first) > len(frozen)
    assert copies.publish(second) < 3000
    copies.remove(10)
    assert copies_at(store).steps == [20]
    assert same_files(copies_at(store).fetch(20, tmp_path / "there"), second)
    assert len(store.names("runs/gpt/objects/")) == 2


def test_a_checkpoint_without_its_manifest_is_none_and_is_completed_later(store: ObjectStore, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 10, {"a": content(1, 1000), "b": content(2, 1000)})
    store.faults.append(Fault(action="500", method="PUT", part="checkpoints/step-", times=1000))
    with pytest.raises(RemoteError, match=r"step-00000010\.json cannot be written now"):
        copies_at(store, tries=1).publish(folder)
    assert copies_at(store).steps == []
    store.faults.clear()
    assert copies_at(store).publish(folder) < 1000, "its files are there already"
    assert copies_at(store).steps == [10]


@pytest.mark.parametrize(
    ("action", "method", "times"),
    [
        ("500", "PUT", 3),
        ("503", "PUT", 3),
        ("cut", "PUT", 2),
        ("500", "GET", 3),
        ("cut", "GET", 2),
        ("short", "GET", 2),
    ],
)
def test_passing_faults_change_nothing(
    action: str, method: str, times: int, store: ObjectStore, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "here", 10, {"a": content(1), "b": content(2, 1000)})
    fault = Fault(action=action, method=method, part="objects/", times=times)
    store.faults.append(fault)
    copies_at(store).publish(folder)
    assert same_files(copies_at(store).fetch(10, tmp_path / "there"), folder)
    assert fault.times == 0, "the fault did happen"


@pytest.mark.parametrize("action", ["slow", "trickle"])
def test_a_load_from_a_slow_store_ends_at_its_limit(action: str, store: ObjectStore, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "here", 10, {"a": content(1), "b": content(2, 1000)})
    copies_at(store).publish(folder)
    copies = copies_at(store)
    fault = Fault(action=action, method="GET", part="objects/", times=100)
    store.faults.append(fault)
    with (
        pytest.raises(RemoteError, match=r"objects/\w+ was not read within 0\.5 s\. Raise the limit\.$"),
        copies.folder.limit(0.5, "Raise the limit."),
    ):
        copies.fetch(10, tmp_path / "there")
    assert not list((tmp_path / "there").iterdir()), "nothing half done is left"
    fault.released.set()
    store.faults.clear()
    assert same_files(copies.fetch(10, tmp_path / "there"), folder)


def test_an_object_that_changed_there_is_found_put_aside_and_sent_again(store: ObjectStore, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "here", 10, {"a": content(1, 1000)})
    copies_at(store).publish(folder)
    (key,) = store.names("runs/gpt/objects/")
    wrong = bytearray(content(1, 1000))
    wrong[500] ^= 1
    store.client().put_object(Bucket=store.bucket, Key=key, Body=bytes(wrong))
    copies = copies_at(store)
    with pytest.raises(CheckpointError, match="a does not have the hash that it was written with"):
        copies.fetch(10, tmp_path / "there")
    assert not list((tmp_path / "there").iterdir())
    assert copies_at(store).steps == []
    assert len(store.names("runs/gpt/condemned/")) == 2
    copies.publish(folder)
    assert same_files(copies_at(store).fetch(10, tmp_path / "there"), folder)


def test_a_missing_object_is_named(store: ObjectStore, tmp_path: Path) -> None:
    copies_at(store).publish(make_checkpoint(tmp_path / "here", 10, {"a": content(1, 1000)}))
    store.client().delete_object(Bucket=store.bucket, Key=store.names("runs/gpt/objects/")[0])
    with pytest.raises(CheckpointError, match="a is missing or does not have 1000 bytes"):
        copies_at(store).fetch(10, tmp_path / "there")


def test_a_damaged_checkpoint_is_not_sent(store: ObjectStore, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 10, {"a": content(1, 1000)})
    (folder / "a").write_bytes(content(2, 1000))
    with pytest.raises(CheckpointError, match="does not have the hash"):
        copies_at(store).publish(folder)
    assert store.names() == []


def test_every_try_fails_with_one_line_after_growing_waits(tmp_path: Path) -> None:
    waits: list[float] = []
    (tmp_path / "a-file").write_text("")
    folder = RemoteFolder(f"file://{tmp_path}/a-file/runs", wait=waits.append)
    with pytest.raises(RemoteError, match=r"^file://.+/a-file/runs/run\.json cannot be written now \(.+\)$"):
        folder.write("run.json", b"{}")
    assert waits == [0.5, 1.0, 2.0]


@pytest.mark.parametrize("action", ["move", "remove", "write"])
def test_a_package_that_cannot_cancel_makes_no_request_after_the_limit(action: str, tmp_path: Path) -> None:
    folder = RemoteFolder(f"file://{tmp_path}")
    folder.write("a", b"1")
    call = {"move": lambda: folder.move("a", "b"), "remove": lambda: folder.remove(["a"]),
            "write": lambda: folder.write("a", b"2")}[action]  # fmt: skip
    with pytest.raises(RemoteError, match=r"/a was not \w+ within 0 s\. Raise it\.$"), folder.limit(0.0, "Raise it."):
        call()
    assert (tmp_path / "a").read_bytes() == b"1"


def test_an_address_that_fsspec_does_not_know_is_one_line() -> None:
    with pytest.raises(RemoteError, match="nope://bucket: cannot be opened"):
        RemoteFolder("nope://bucket")


def test_a_folder_is_an_address_too(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "here", 10, {"a": content(1, 1000)})
    copies = RemoteCopies(RemoteFolder(f"file://{tmp_path}/remote"))
    copies.open()
    copies.publish(folder)
    assert same_files(copies.fetch(10, tmp_path / "there"), folder)
    assert read_manifest(tmp_path / "there" / "step-00000010")["step"] == 10
    copies.remove(10)
    assert not [path for path in (tmp_path / "remote").rglob("*") if path.is_file()]
