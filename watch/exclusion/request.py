"""A request to leave ranks out of the run, from a node's `watch` to its launcher: a small file in the node's folder.

write_request(run, node_rank=0, request=ExclusionRequest(attempt=0, ranks=(1,), ...))
requests = RequestFile(run, node_rank=0)
requests.poll(attempt=0)                    # the request if it is new and of this attempt, else None
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from probes.tape.rundir import RunDir

__all__ = ["ExclusionRequest", "RequestFile", "write_request"]

NAME = "exclusion-request.json"
MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ExclusionRequest:
    """Leave the devices of these ranks out from the next attempt on."""

    attempt: int
    ranks: tuple[int, ...]
    cause: str
    """straggler or xid."""
    reason: str
    keeps_size: bool = False
    """Only if the run stays as large, because a spare takes the place."""
    min_size_ratio: float = 0.0
    """Ranks after / before that the run must exceed: a smaller run must gain more than it loses."""
    dry_run: bool = False


class RequestFile:
    """Polled by the launcher at a high frequency: one `stat` while nothing is new."""

    def __init__(self, run: RunDir, node_rank: int) -> None:
        self._path = _path(run, node_rank)
        self._mtime_ns = self._modified_ns()  # of an earlier launch: answered by that
        self._answered: set[tuple[int, tuple[int, ...]]] = set()

    def poll(self, attempt: int) -> ExclusionRequest | None:
        """The request if it is new and of this attempt; None otherwise."""
        modified_ns = self._modified_ns()
        if modified_ns == self._mtime_ns:
            return None
        self._mtime_ns = modified_ns
        request = _read(self._path)
        if request is None or request.attempt != attempt or (attempt, request.ranks) in self._answered:
            return None
        self._answered.add((attempt, request.ranks))
        return request

    def _modified_ns(self) -> int:
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return 0


def write_request(run: RunDir, node_rank: int, request: ExclusionRequest) -> bool:
    """Place a request in the folder of a node, over an earlier one; False where that folder cannot be written."""
    path = _path(run, node_rank)
    new = path.with_suffix(f".{os.getpid()}.new")
    try:
        new.write_text(json.dumps(asdict(request)))
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        return False
    return True


def _path(run: RunDir, node_rank: int) -> Path:
    return run.node_dir(node_rank) / NAME


def _read(path: Path) -> ExclusionRequest | None:
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(MAX_BYTES))
        return ExclusionRequest(
            attempt=int(found["attempt"]),
            ranks=tuple(int(rank) for rank in found["ranks"]),
            cause=str(found["cause"]),
            reason=str(found["reason"])[:1000],
            keeps_size=found["keeps_size"] is True,
            min_size_ratio=float(found["min_size_ratio"]),
            dry_run=found["dry_run"] is not False,
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
