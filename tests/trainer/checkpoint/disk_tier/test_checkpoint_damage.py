"""Five hundred damaged checkpoints: none is loaded, and the newest one that is whole always is."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from probes.guard.ledger import Ledger
from probes.recorder import NullRecorder
from tests.depth import tried
from tests.processes import run_ranks
from tests.trainer.training_runs import run_loop, small, with_steps
from trainer.checkpoint.disk_tier import loading, manifest
from trainer.checkpoint.disk_tier.checkpoints import DiskCheckpoints, checkpoint_steps
from trainer.checkpoint.disk_tier.condemned import NOTE_NAME, note_reason
from trainer.checkpoint.disk_tier.loading import LoadError
from trainer.checkpoint.disk_tier.manifest import MANIFEST_NAME, CheckpointError, FileDigest, StorageError
from trainer.checkpoint.state import training_tensors
from trainer.config.config import Config
from trainer.layout.resolve import resolve
from trainer.training.build import build
from trainer.training.rank_training import Training

DAMAGES = tried(150, nightly=500)
LOADED_ONE_OF = 5
"""After one damage of so many the newest whole checkpoint is loaded; after the others nothing changes."""
STEPS = (2, 4, 6)


def _config(**parallel: int) -> Config:
    model = {"dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "hidden_dim": 16}
    checkpoint = {"interval": 2, "memory_interval": 0, "asynchronous": False}
    return with_steps(small(model=model, checkpoint=checkpoint, parallel=parallel), STEPS[-1])


def _save(rank: int, world_size: int, folder: Path) -> None:
    run_loop(_config(dp_shard=2), folder, rank=rank, world_size=world_size)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints of two ranks."""
    folder = tmp_path_factory.mktemp("pristine")
    run_ranks(_save, world_size=2, args=(folder,))
    assert checkpoint_steps(folder / "checkpoints") == list(STEPS)
    return folder / "checkpoints"


@pytest.fixture(scope="module")
def training() -> Training:
    return build(_config(), resolve(_config(), 1), torch.device("cpu"))


def _truncate(path: Path, other: Path, moments: random.Random) -> None:
    os.truncate(path, moments.randrange(path.stat().st_size))


def _flip(path: Path, other: Path, moments: random.Random) -> None:
    good = path.read_bytes()
    while True:
        blob = bytearray(good)
        blob[moments.randrange(len(blob))] ^= 1 << moments.randrange(8)
        if path.name != MANIFEST_NAME or not _mean_the_same(good, blob):
            break
    path.write_bytes(blob)


def _mean_the_same(good: bytes, blob: bytes | bytearray) -> bool:
    """Return True if two manifests have equal values: 1.7169346211776848 and ...849 are one float, and no damage."""
    try:
        return bool(json.loads(good) == json.loads(blob))
    except ValueError:
        return False


def _blank(path: Path, other: Path, moments: random.Random) -> None:
    """A page that was never written, as after a power cut; at least one byte of it was none."""
    blob = bytearray(path.read_bytes())
    start = moments.randrange(len(blob))
    blob[start : start + 512] = bytes(len(blob[start : start + 512]))
    path.write_bytes(blob + b"\0")


def _append(path: Path, other: Path, moments: random.Random) -> None:
    with path.open("ab") as file:
        file.write(moments.randbytes(moments.randint(1, 100)))


def _swap(path: Path, other: Path, moments: random.Random) -> None:
    """The same file of an older checkpoint."""
    shutil.copyfile(other / path.name, path)


def _remove(path: Path, other: Path, moments: random.Random) -> None:
    path.unlink()


HARMS = (_truncate, _flip, _blank, _append, _swap, _remove)


def test_damage_is_found_and_the_newest_whole_one_is_loaded(pristine: Path, training: Training, tmp_path: Path) -> None:
    expected = {step: _load(pristine, step, training) for step in STEPS}
    moments, hits = random.Random(11), Counter[Any]()
    folder = tmp_path / "checkpoints"
    shutil.copytree(pristine, folder)
    state = expected[STEPS[-1]]
    for number in range(DAMAGES):
        disk = _disk(folder, training)
        bad = STEPS[-1 - (number % 10 == 0) :]  # now and then the newest two
        for step in bad:
            path = moments.choice(sorted(disk.path(step).iterdir()))
            harm = moments.choice(HARMS)
            harm(path, pristine / "step-00000002", moments)
            hits[harm.__name__, path.name] += 1
        if number % LOADED_ONE_OF:
            assert all(disk.load(step) is None for step in bad), hits
        else:
            loaded = disk.load_newest(Ledger())
            assert loaded is not None
            state = expected[loaded.values.position.step]
            assert loaded.values.position.step == STEPS[-1 - len(bad)], hits
        _assert_is(training, state)
        assert checkpoint_steps(folder) == [step for step in STEPS if step not in bad]
        for step in bad:
            disk.path(step).with_suffix(".condemned").rename(tmp_path / f"{number}-{step}")
            shutil.copytree(pristine / disk.path(step).name, disk.path(step))
    assert sum(hits.values()) >= DAMAGES
    assert len(hits) == len(HARMS) * 4, "every harm was done to every file"


def test_nothing_is_loaded_if_no_checkpoint_is_whole(pristine: Path, training: Training, tmp_path: Path) -> None:
    moments = random.Random(12)
    shutil.copytree(pristine, tmp_path / "checkpoints")
    for step in STEPS:
        _flip(tmp_path / "checkpoints" / f"step-{step:08d}" / "__1_0.distcp", pristine, moments)
    with torch.no_grad():
        for tensor in training_tensors(training).values():
            tensor.fill_(7.0)
    with pytest.raises(CheckpointError, match="none of 3 checkpoints can be used"):
        _disk(tmp_path / "checkpoints", training).load_newest(Ledger())
    assert all(bool((tensor == 7.0).all()) for tensor in training_tensors(training).values()), "nothing was touched"


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOMEM, errno.EACCES])
@pytest.mark.parametrize("place", ["os.open", "os.scandir", "read"])
def test_storage_that_cannot_be_read_condemns_nothing(
    pristine: Path, training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, place: str
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(pristine, folder)
    disk = _disk(folder, training)

    def fails(*arguments: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    targets = {"os.open": os, "os.scandir": os, "read": manifest}
    names = {"os.open": "open", "os.scandir": "scandir", "read": "digest_file"}
    with monkeypatch.context() as patch:
        patch.setattr(targets[place], names[place], fails)
        with pytest.raises(StorageError, match=os.strerror(number)):
            disk.load_newest(Ledger())
    assert checkpoint_steps(folder) == list(STEPS)
    loaded = disk.load_newest(Ledger())
    assert loaded is not None
    assert loaded.values.position.step == STEPS[-1]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
@pytest.mark.parametrize("place", ["folder", "note"])
def test_unreadable_condemned_checkpoints_are_not_taken_for_none(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, place: str
) -> None:
    """The disk fails once the finished checkpoints are listed, of which there are none."""
    folder = tmp_path / "checkpoints"
    condemned = folder / "step-00000002.condemned"
    condemned.mkdir(parents=True)
    note_reason(condemned, "__0_0.distcp has 7 bytes, not 9", is_damaged=True)
    disk = DiskCheckpoints(folder, training, NullRecorder(), keep=3)
    scandir, open_fd = os.scandir, os.open
    listed: list[Any] = []

    def list_once(path: Any) -> Any:
        if place == "folder" and listed:
            raise OSError(number, os.strerror(number))
        listed.append(path)
        return scandir(path)

    def open_all_but_the_note(path: Any, *arguments: Any, **options: Any) -> int:
        if place == "note" and Path(path).name == NOTE_NAME:
            raise OSError(number, os.strerror(number))
        return open_fd(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", list_once)
        patch.setattr(os, "open", open_all_but_the_note)
        with pytest.raises(StorageError, match=os.strerror(number)):
            disk.load_newest(Ledger())
    with pytest.raises(CheckpointError, match=r"condemned as damaged.+checkpoint\.resume=false"):
        disk.load_newest(Ledger())


def test_a_checkpoint_misread_once_is_not_condemned(
    pristine: Path, training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real, read = tmp_path / "checkpoints", manifest.digest_file, Counter[str]()
    shutil.copytree(pristine, folder)

    def flaky(path: Path, *, from_disk: bool = False) -> FileDigest:
        read[path.name] += 1
        found = real(path, from_disk=from_disk)
        return found if read[path.name] == wrong_until else replace(found, blake2b=f"{read[path.name]:064x}"[::-1])

    monkeypatch.setattr(manifest, "digest_file", flaky)
    wrong_until = 2
    loaded = _disk(folder, training).load_newest(Ledger())
    assert loaded is not None
    assert loaded.values.position.step == STEPS[-1]
    wrong_until = -1
    with pytest.raises(StorageError, match="reads differently each time"):
        _disk(folder, training).load_newest(Ledger())
    assert checkpoint_steps(folder) == list(STEPS)


def test_a_manifest_that_is_wrong_only_in_memory_is_not_condemned(
    pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel holds a bad page of it until it is told to drop that."""
    folder = shutil.copytree(pristine / "step-00000006", tmp_path / "step-00000006")
    good = (folder / MANIFEST_NAME).read_bytes()
    (folder / MANIFEST_NAME).write_bytes(good[:-2])

    def drop(*arguments: int) -> None:
        (folder / MANIFEST_NAME).write_bytes(good)

    with pytest.raises(CheckpointError, match="damaged"):
        manifest.read_manifest(folder)
    monkeypatch.setattr(os, "posix_fadvise", drop)
    assert manifest.read_manifest(folder)["step"] == 6


def test_an_error_after_the_hashes_agreed_condemns_nothing(
    pristine: Path, training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(pristine, folder)

    def fails(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(loading, "dcp_load", fails)
    with pytest.raises(LoadError, match="out of memory"):
        _disk(folder, training).load_newest(Ledger())
    assert checkpoint_steps(folder) == list(STEPS)


def test_where_only_damaged_ones_are_left_starting_over_must_be_asked_for(
    pristine: Path, training: Training, tmp_path: Path
) -> None:
    folder, moments = tmp_path / "checkpoints", random.Random(13)
    shutil.copytree(pristine, folder)
    for step in STEPS:
        _flip(folder / f"step-{step:08d}" / "__1_0.distcp", pristine, moments)
    for _ in range(2):  # condemned by the first, and still there for the second
        with pytest.raises(CheckpointError, match=r"checkpoint\.resume=false"):
            _disk(folder, training).load_newest(Ledger())
    disk = _disk(folder, training)
    disk.saved = [100]
    disk.prune(100)
    disk.background.submit(bool).result()
    assert len(list(folder.glob("step-*.condemned"))) == len(STEPS), "kept until there are enough good ones"
    for path in folder.glob("step-*.condemned"):
        note_reason(path, "it holds the update of a batch that was given up", is_damaged=False)
    assert _disk(folder, training).load_newest(Ledger()) is None, "the guard went back before them by itself"


def test_a_condemned_checkpoint_is_not_loaded_in_an_older_form(
    pristine: Path, training: Training, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(pristine, folder)
    shutil.copytree(pristine / "step-00000006", folder / "step-00000006.older")
    _disk(folder, training).condemn(6, "it holds the update of a batch that was given up")
    _disk(folder, training).open()
    assert checkpoint_steps(folder) == [2, 4]


def _disk(folder: Path, training: Training) -> DiskCheckpoints:
    disk = DiskCheckpoints(folder, training, NullRecorder(), keep=3)
    disk.adopt(Ledger(), STEPS[-1])
    return disk


def _load(folder: Path, step: int, training: Training) -> dict[str, torch.Tensor]:
    assert _disk(folder, training).load(step) is not None
    return {name: value.clone() for name, value in training_tensors(training).items()}


def _assert_is(training: Training, expected: dict[str, torch.Tensor]) -> None:
    found = training_tensors(training)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
