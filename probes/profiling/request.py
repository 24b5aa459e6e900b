"""A request to profile ranks: a small file in a node's folder, polled by the ranks of that node.

write_request(run, node_rank=0, request=CaptureRequest(number=1, attempt=0, ranks=(3, 1), ...))
requests = RequestFile(run, node_rank=0, attempt=0, rank=3)
requests.poll()                     # the request if it is new and names this rank and attempt, else None

A request is not signed: only the owner can write to a run's folder, and a request can only cost a few slower steps and
some of the traces' budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..settings.sections import MAX_STEPS
from ..tape.files.request_file import RequestPoll, write_request_file
from ..tape.rundir import RunDir

__all__ = ["CaptureRequest", "RequestFile", "write_request"]

NAME = "capture-request.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRequest:
    """Profile `num_steps` steps from `first_step` on, or from the next step if `first_step` is over."""

    number: int
    attempt: int
    ranks: tuple[int, ...]
    first_step: int
    num_steps: int
    reason: str


class RequestFile:
    """Polled by a rank. Requests to earlier attempts are ignored."""

    def __init__(self, run: RunDir, *, node_rank: int, attempt: int, rank: int) -> None:
        self._poll, self._attempt, self._rank = RequestPoll(run.node_dir(node_rank) / NAME), attempt, rank
        self._answered = 0

    def poll(self) -> CaptureRequest | None:
        """The request if it is new and for this rank; None otherwise."""
        request = self._poll.changed(_parse)
        if request is None or request.attempt != self._attempt or self._rank not in request.ranks:
            return None
        if request.number == self._answered:
            return None
        self._answered = request.number
        return request


def write_request(run: RunDir, node_rank: int, request: CaptureRequest) -> bool:
    """Write a request to the folder of a node, replacing an earlier one; False if the folder cannot be written."""
    return write_request_file(run.node_dir(node_rank) / NAME, request)


def _parse(fields: Any) -> CaptureRequest:
    return CaptureRequest(
        number=int(fields["number"]),
        attempt=int(fields["attempt"]),
        ranks=tuple(int(rank) for rank in fields["ranks"]),
        first_step=int(fields["first_step"]),
        num_steps=min(MAX_STEPS, max(1, int(fields["num_steps"]))),
        reason=str(fields["reason"])[:1000],
    )
