"""Read snapshots of torch's CUDA memory, written by Rankscope or by `torch.cuda.memory._dump_snapshot`.

    is_memory_snapshot(head(path))
    found = read_memory_snapshot(Path("memory/attempt-0/rank-00003-memory.json.gz"))
    found.state.sites[0], found.problem

`safe_pickle` reads a pickle without executing it, and `probes.profiling.memory_state` summarises its content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from probes.profiling.memory_state import FORMAT, MemoryState, summarise
from store.readers.dumps.flight_recorder import MAX_PICKLE_BYTES
from store.readers.dumps.safe_pickle import loads
from store.readers.untrusted.confined import confined
from store.readers.untrusted.external_files import DOCUMENT_BYTES, SourceError, Survey, rank_of_name, unpacked

__all__ = ["ReadSnapshot", "is_memory_snapshot", "read_memory_snapshot", "read_memory_snapshots"]

_START = 64
"""Number of leading bytes that contain a pickle's first key."""
_KEYS = (b"\x08segments", b"\x08\x00\x00\x00segments")
_OURS = f'{{"format": "{FORMAT}"'.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSnapshot:
    """Memory state in a snapshot, and what the file lacks (empty if nothing)."""

    state: MemoryState
    problem: str = ""


def is_memory_snapshot(first: bytes) -> bool:
    """Return True if a file that starts with `first` is a snapshot of either kind."""
    return first.startswith(_OURS) or (first[:1] == b"\x80" and any(key in first[:_START] for key in _KEYS))


def read_memory_snapshots(found: Survey) -> list[dict[str, Any]]:
    """Read the state in each file, with its `path` and `rank`. Unreadable files are listed in `found.problems`."""
    rows = []
    for path in found.paths:
        try:
            read = confined(read_memory_snapshot, path)
        except SourceError as error:
            found.add_problem(path, str(error))
            continue
        if read.problem:
            found.add_problem(path, read.problem)
        rows.append({**asdict(read.state), "path": path.name, "rank": rank_of_name(path)})
    return rows


def read_memory_snapshot(path: Path) -> ReadSnapshot:
    """Read and check one snapshot. Raises SourceError with one line."""
    blob = b"".join(unpacked(path, MAX_PICKLE_BYTES))
    try:
        content = _json(blob) if blob[:1] == b"{" else loads(blob)
        if not isinstance(content, Mapping):
            raise SourceError("is not a memory snapshot")
        state = summarise(content)
    except SourceError:
        raise
    except (ValueError, RecursionError) as error:
        raise SourceError(str(error) if isinstance(error, ValueError) else "is nested too deeply") from None
    return ReadSnapshot(state=state, problem=_lacking(content.get("left_out")))


def _json(blob: bytes) -> Any:
    if len(blob) > DOCUMENT_BYTES:
        raise SourceError(f"holds more than {DOCUMENT_BYTES:,} bytes: no Rankscope snapshot is that large")
    try:
        return json.loads(blob)
    except ValueError:
        raise SourceError("is damaged: not JSON") from None


def _lacking(left_out: Any) -> str:
    """Describe what the writer left out for lack of space."""
    counts = left_out if isinstance(left_out, Mapping) else {}
    texts = {"blocks": "small blocks", "stacks": "stacks of small blocks"}
    cut = {text: counts.get(key) for key, text in texts.items()}
    parts = [f"{count:,} {text}" for text, count in cut.items() if isinstance(count, int) and count > 0]
    return f"was shortened when it was written: it lacks {' and '.join(parts)}" if parts else ""
