"""A store for each round of a rendezvous, so that a node that joins a later round finds it.

    give_each_round_a_store()    # before torch makes its rendezvous handler

torch 2.13 keeps one store for the ranks over all rounds, publishes its address in the first of them alone, and a node
that joins a later one waits for that address until its store times out. With this each round has a store in its first
rank.
"""

from __future__ import annotations

import os

__all__ = ["give_each_round_a_store"]


def give_each_round_a_store() -> None:
    """A user's value of torch's variable stays."""
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
