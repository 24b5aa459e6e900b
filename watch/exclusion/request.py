"""A request to exclude ranks from the run, sent by a node's `watch` to its launcher as a small file in the node's
folder.

write_request(run, node_rank=0, request=ExclusionRequest(attempt=0, ranks=(1,), ...))
requests = RequestFile(run, node_rank=0)
requests.poll(attempt=0)                    # the request if it is new and for this attempt, else None
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from probes.tape.files.request_file import RequestPoll, write_request_file
from probes.tape.rundir import RunDir

__all__ = ["ExclusionRequest", "RequestFile", "write_request"]

NAME = "exclusion-request.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExclusionRequest:
    """Exclude the devices of these ranks in the next attempt and all later ones."""

    attempt: int
    ranks: tuple[int, ...]
    cause: str
    """Either `straggler` or `xid`."""
    reason: str
    keeps_size: bool = False
    """True: exclude only if a spare replaces the device, so that the run keeps its size."""
    min_size_ratio: float = 0.0
    """Minimum ratio of ranks after / before the exclusion: a smaller run must gain more than it loses."""
    dry_run: bool = False


class RequestFile:
    """Polled frequently by the launcher. Requests for other attempts are ignored."""

    def __init__(self, run: RunDir, node_rank: int) -> None:
        self._poll = RequestPoll(run.node_dir(node_rank) / NAME)
        self._answered: set[tuple[int, tuple[int, ...]]] = set()

    def poll(self, attempt: int) -> ExclusionRequest | None:
        """Return the request if it is new and for this attempt, otherwise None."""
        request = self._poll.changed(_parse)
        if request is None or request.attempt != attempt or (attempt, request.ranks) in self._answered:
            return None
        self._answered.add((attempt, request.ranks))
        return request


def write_request(run: RunDir, node_rank: int, request: ExclusionRequest) -> bool:
    """Write a request to a node's folder, replacing an earlier one. Returns False if the folder cannot be written."""
    return write_request_file(run.node_dir(node_rank) / NAME, request)


def _parse(fields: Any) -> ExclusionRequest:
    return ExclusionRequest(
        attempt=int(fields["attempt"]),
        ranks=tuple(int(rank) for rank in fields["ranks"]),
        cause=str(fields["cause"]),
        reason=str(fields["reason"])[:1000],
        keeps_size=fields["keeps_size"] is True,
        min_size_ratio=float(fields["min_size_ratio"]),
        dry_run=fields["dry_run"] is not False,
    )
