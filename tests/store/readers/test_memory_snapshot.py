"""Files of CUDA memory: torch's pickles and our own, and a verdict of both."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from analyzers.evidence.diagnose_files import diagnose_files
from analyzers.report.json import to_json
from analyzers.report.terminal.diagnosis_text import render
from probes.profiling.memory_snapshots import reduced
from probes.profiling.memory_state import summarise
from store.readers.formats import format_of
from store.readers.memory_snapshot import read_memory_snapshot
from store.readers.untrusted.external_files import SourceError
from tests.probes.profiling.played_memory import SEGMENT_BYTES, PlayedMemory


def exhausted() -> dict[str, Any]:
    cuda = PlayedMemory()
    cuda.alloc(10 << 20, "model.py", 12)
    cuda.fail(8 << 20, "mlp.py", 31)
    return cuda.snapshot()


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_torchs_pickle_is_read(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "oom_rank_5.pickle"
    path.write_bytes(pickle.dumps(exhausted(), protocol))
    assert format_of(path) == "memory_snapshot"
    assert read_memory_snapshot(path).state == summarise(exhausted())
    (finding,) = diagnose_files([path]).findings
    assert (finding.kind, finding.cause, finding.status, finding.ranks) == (
        "rank_lost", "out_of_memory", "suspect", (5,),
    )  # fmt: skip
    assert finding.summary == "Rank 5 ran out of memory: it asked for 8 MiB (gpt/mlp.py:31 in forward)."
    assert finding.evidence["unused_bytes"] == 2 * SEGMENT_BYTES - (10 << 20)


def test_our_file_is_read_and_says_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "rank-00003-memory.json.gz"
    path.write_bytes(gzip.compress(json.dumps(reduced(exhausted())).encode()))
    assert format_of(path) == "memory_snapshot"
    assert read_memory_snapshot(path).state == summarise(exhausted())
    assert read_memory_snapshot(path).problem == ""
    path.write_bytes(gzip.compress(json.dumps(reduced(exhausted(), 300)).encode()))
    assert "was shortened when it was written" in read_memory_snapshot(path).problem


def test_a_snapshot_without_a_failure_proves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    cuda = PlayedMemory()
    cuda.alloc(10 << 20, "model.py", 12)
    path.write_bytes(pickle.dumps(cuda.snapshot()))
    (finding,) = diagnose_files([path]).findings
    assert finding.status == "insufficient_data"
    assert "gpt/model.py:12 in forward: 10 MiB in 1 block" in finding.summary


class _Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_nothing_in_a_pickle_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "rank_5.pickle"
    path.write_bytes(pickle.dumps({**exhausted(), "more": _Runs()}))
    with pytest.raises(SourceError, match="asks for a Python object"):
        read_memory_snapshot(path)
    assert diagnose_files([path]).findings[0].status == "insufficient_data"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"format": "rankscope.memory_snapshot", "segments": [', "is damaged: not JSON"),
        (b'{"format": "rankscope.memory_snapshot"}', "holds no memory of a CUDA device"),
        (b'{"format": "rankscope.memory_snapshot", "segments": ' + b"[" * 100_000, "nested too deeply|no JSON"),
        (pickle.dumps(exhausted())[:-40], "is cut off"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "rank_5.bin"
    path.write_bytes(content)
    assert format_of(path) == "memory_snapshot"
    with pytest.raises(SourceError, match=words) as raised:
        read_memory_snapshot(path)
    assert "\n" not in str(raised.value)


def test_names_of_a_foreign_file_do_not_reach_the_terminal_raw(tmp_path: Path) -> None:
    shown = exhausted()
    shown["segments"][0]["blocks"][0]["frames"] = [{"filename": "/x/\x1b[31m.py", "line": 1, "name": "f\ng"}]
    (tmp_path / "rank_5.pickle").write_bytes(pickle.dumps(shown))
    diagnosis = diagnose_files([tmp_path])
    screen = io.StringIO()
    render(diagnosis, Console(file=screen, width=200, no_color=True, legacy_windows=False))
    assert not any(ord(character) < 32 and character != "\n" for character in screen.getvalue())
    json.dumps(to_json(diagnosis), allow_nan=False)
