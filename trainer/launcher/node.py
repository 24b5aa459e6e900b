"""This node's part of a launch, and how the launch ended: what passes between the command line and the launcher."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MeetingError", "Node", "Outcome"]


class MeetingError(ValueError):
    """The nodes cannot meet; one line that says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of a run. `rank` names its tapes and its store, and stays the same over restarts."""

    nproc: int
    rank: int = 0
    min_nodes: int = 1
    max_nodes: int = 1
    endpoint: str = "localhost:0"
    """Where the nodes meet: host:port, the same on all of them."""
    failures: int = 0
    """Of this node in former lives of its launcher: see `trainer.launcher.nodes.node_exclusion`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a launch ended: `reason` is finished, preempted, interrupted, given_up, fenced, left_out or failed;
    `restarts` counts the lives of the worker group after the first."""

    reason: str
    exit_code: int
    restarts: int = 0
    message: str = ""
