"""A power cut leaves a run its description and its job's secret: both are on the disk before they have their names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from probes.tape.rundir import RunDir
from watch.digests.job_secret import FILE, create_job_secret

WRITERS: dict[str, Callable[[RunDir], object]] = {
    "run.json": lambda run: run.begin_manifest({"train": {"steps": 100}}),
    FILE: create_job_secret,
}


@pytest.mark.parametrize("name", WRITERS)
def test_content_is_synced_before_the_name_and_the_name_after_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.adopt(tmp_path / "run")[0]
    path = run.path / name
    synced: list[tuple[int, int, bool]] = []
    sync = os.fsync

    def seen(fd: int) -> None:
        found = os.fstat(fd)
        synced.append((found.st_ino, found.st_size, path.exists()))
        sync(fd)

    monkeypatch.setattr(os, "fsync", seen)
    WRITERS[name](run)
    file = path.stat()
    assert (file.st_ino, file.st_size, False) in synced, "whole, before it is named"
    last_of_folder = [has_name for inode, _, has_name in synced if inode == run.path.stat().st_ino][-1]
    assert last_of_folder, "its name, too"
    assert file.st_mode & 0o077 == 0
