"""Types shared by the command line and the launcher: the node, and the outcome of a launch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Node", "NodeRendezvousError", "Outcome"]


class NodeRendezvousError(ValueError):
    """The rendezvous of the nodes failed. The message is one line with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of a run. `rank` names its tapes and store, and does not change with restarts."""

    nproc: int
    rank: int = 0
    min_nodes: int = 1
    max_nodes: int = 1
    endpoint: str = "localhost:0"
    """Address of the rendezvous: host:port, the same on all nodes."""
    failures: int = 0
    """Failures of this node under earlier launchers: see `trainer.launcher.nodes.node_exclusion`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a launch. `reason` is finished, preempted, interrupted, given_up, fenced, left_out or failed.
    `restarts`: number of starts of the worker group after the first one."""

    reason: str
    exit_code: int
    restarts: int = 0
    message: str = ""
