"""Manifests of checkpoints and ledgers, damaged or made up (F48): refused in one line, nothing else is opened."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.guard.ledger import Ledger
from trainer.checkpoint.disk_tier.manifest import (
    MANIFEST_NAME,
    CheckpointError,
    digest_file,
    read_manifest,
    verify_files,
    write_manifest,
)
from trainer.checkpoint.disk_tier.safe_reader import SafeReader

SHARD = "__0_0.distcp"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / SHARD).write_bytes(b"weights")
    write_manifest(folder, {"step": 50}, {SHARD: digest_file(folder / SHARD)})
    return folder


def verify(folder: Path) -> None:
    manifest = read_manifest(folder)
    verify_files(folder, manifest, manifest["files"])


def _in_place(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


def _content(name: str, blob: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(blob)


def _named(name: str) -> Callable[[Path], object]:
    """A manifest with a right hash that lists a file of this name."""

    def change(folder: Path) -> None:
        write_manifest(folder, {"step": 50}, {name: digest_file(folder / SHARD)})

    return change


def _link(target: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(target)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "an empty manifest": _content(MANIFEST_NAME, b""),
    "a manifest of a list": _content(MANIFEST_NAME, b"[]"),
    "a manifest of deep JSON": _content(MANIFEST_NAME, b"[" * 300_000),
    "a manifest of invalid UTF-8": _content(MANIFEST_NAME, b'{"digest": "\xff"}'),
    "a manifest of NaN": _content(MANIFEST_NAME, b'{"digest": NaN, "format": NaN, "files": NaN}'),
    "a manifest of files that are numbers": _content(MANIFEST_NAME, b'{"digest": "", "format": 1, "files": {"a": 1}}'),
    "a manifest with odd fields": _content(MANIFEST_NAME, b'{"digest": "", "format": 1, "files": {"a": {"b": 1}}}'),
    "a manifest of keys twice": _content(MANIFEST_NAME, b'{"digest": "", "digest": [], "format": 1, "files": {}}'),
    "a manifest of a terabyte": lambda folder: os.truncate(folder / MANIFEST_NAME, 1 << 40),
    "a manifest that is a FIFO": _in_place(MANIFEST_NAME, os.mkfifo),
    "a manifest that is a folder": _in_place(MANIFEST_NAME, Path.mkdir),
    "a manifest that is /dev/zero": _in_place(MANIFEST_NAME, _link("/dev/zero")),
    "a manifest that leads to itself": _in_place(MANIFEST_NAME, _link(MANIFEST_NAME)),
    "a file above the folder": _named("../secret"),
    "a file of the system": _named("/etc/hostname"),
    "the folder itself": _named("."),
    "the folder above": _named(".."),
    "a name with NUL": _named("a\0b"),
    "a shard that is a FIFO": _in_place(SHARD, os.mkfifo),
    "a shard that is a folder": _in_place(SHARD, Path.mkdir),
    "a shard that leads out": _in_place(SHARD, _link("/etc/hostname")),
    "a shard that is missing": lambda folder: (folder / SHARD).unlink(),
    "a shard that is longer": lambda folder: (folder / SHARD).write_bytes(b"weights and more"),
    "a shard with a flipped bit": lambda folder: (folder / SHARD).write_bytes(b"weightr"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    folder = checkpoint(tmp_path / "step-00000050")
    DAMAGES[name](folder)
    with pytest.raises(CheckpointError) as caught:
        verify(folder)
    assert "\n" not in str(caught.value)
    assert "step-00000050" in str(caught.value)


LEDGER = {"skipped": [[4, "bad"]], "rollbacks": 1, "failures": 0, "incident_step": 0, "rate_scale": 0.5,
          "rate_until_step": 9, "good_step": None, "corruptions": {}, "stopped": ""}  # fmt: skip
LEDGERS: dict[str, bytes | Callable[[Path], object]] = {
    "empty": b"",
    "deep": b"[" * 300_000,
    "a list": b"[]",
    "invalid UTF-8": b"\xff\xfe",
    "a pickle": b"\x80\x04cos\nsystem\n(X\x02\0\0\0idtR.",
    **{
        f"{key} of {value!r}": json.dumps(LEDGER | {key: value}).encode()
        for key, value in (
            ("rate_scale", float("nan")), ("rate_scale", float("inf")), ("rate_scale", -1.0), ("rate_scale", 0),
            ("rate_scale", []), ("skipped", {"a": 1}), ("skipped", [[1]]), ("skipped", 7), ("rollbacks", None),
            ("good_step", "x"), ("good_step", float("inf")), ("corruptions", [1]), ("corruptions", {"gpu": {}}),
            ("incident_step", float("nan")),
        )
    },
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "a terabyte": lambda path: (path.write_bytes(b"{"), os.truncate(path, 1 << 40)),
    "a link": lambda path: path.symlink_to("/etc/hostname"),
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEDGERS)
def test_a_damaged_ledger_is_told_and_counts_as_empty(tmp_path: Path, name: str) -> None:
    path, made = tmp_path / "ledger.json", LEDGERS[name]
    if isinstance(made, bytes):
        path.write_bytes(made)
    else:
        made(path)
    ledger, problem = Ledger.load(path)
    assert problem.startswith("ledger.json is damaged")
    assert not ledger.skipped
    assert ledger.rate_scale == 1.0


@given(values=st.dictionaries(st.sampled_from(sorted(LEDGER)), JSON))
def test_any_ledger_is_whole_or_refused(values: dict[str, Any]) -> None:
    try:
        ledger = Ledger.from_json(LEDGER | values)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
        return
    assert 0.0 < ledger.rate_scale <= 1.0
    assert all(isinstance(batch, int) for batch in ledger.skipped)


@given(content=JSON | st.fixed_dictionaries({"format": st.just(1), "digest": JSON, "files": JSON}))
def test_any_manifest_is_refused(tmp_path_factory: pytest.TempPathFactory, content: Any) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / MANIFEST_NAME).write_text(json.dumps(content))
    with pytest.raises(CheckpointError):
        read_manifest(folder)


class Program:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("inner", [lambda path: Program(path), lambda path: {"model.a": Program(path)}, lambda path: 3])
def test_a_program_in_the_metadata_is_refused_and_not_run(tmp_path: Path, inner: Callable[[Path], object]) -> None:
    folder = tmp_path / "step-00000050"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(inner(tmp_path / "made")))
    with pytest.raises(CheckpointError, match="metadata was refused"):
        SafeReader(folder).read_metadata()
    assert not (tmp_path / "made").exists()
