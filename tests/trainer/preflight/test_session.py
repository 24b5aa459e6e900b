"""What rank 0 gathers from the others, of whom some or most never come."""

from __future__ import annotations

import json
import time

from trainer.preflight.joining import Place
from trainer.preflight.session import Options, Session
from trainer.preflight.verdict.policy import PreflightPolicy
from trainer.torch_compat import HashStore


def test_many_missing_ranks_cost_one_deadline() -> None:
    """Each that is waited for after it would let the ranks that came give up before rank 0 answers them."""
    store = HashStore()
    session = Session(
        Place(rank=0, local_rank=0, world_size=4000, store=store), Options(timeout_s=0.3), PreflightPolicy()
    )
    for rank in (0, 2000, 3999):
        store.set(f"hello/{rank}", json.dumps({"rank": rank}))
    start = time.monotonic()
    assert session._gather("hello", range(4000)) == {rank: {"rank": rank} for rank in (0, 2000, 3999)}
    assert time.monotonic() - start < 30
