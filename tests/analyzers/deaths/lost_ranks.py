"""Runs of four ranks in which some are lost, judged for hangs and deaths together."""

from __future__ import annotations

from analyzers.finding import Finding
from analyzers.run.policy import StallPolicy
from tests.analyzers.judged import judged_hangs, judged_losses
from tests.analyzers.standstill import World

POLICY = StallPolicy()


def lost(world: World, now_ns: int | None = None) -> list[Finding]:
    assert judged_hangs(world.store, POLICY, now_ns) == []
    return judged_losses(world.store, POLICY, now_ns)


def killed(rank: int = 2, name: str = "SIGKILL", code: int = -9) -> World:
    """A rank dies of a signal; the others' collectives break."""
    world = World()
    for other in set(world.ranks) - {rank}:
        world.enter(other)
        world.event("exception", 0.03, rank=other, type="RuntimeError",
                    message="[pair.cc:500] Connection closed by peer [127.0.0.1]:9")  # fmt: skip
    world.event("rank_exit", 0.1, exit_rank=rank, exit_code=code, signal=name, pid=7, message="")
    return world


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5026."


def traced(path: str, error: str, line: int = 12, function: str = "read", *, before: str = "") -> str:
    return (
        f"{before}Traceback (most recent call last):\n"
        '  File "/home/me/train.py", line 140, in main\n    step()\n'
        f'  File "{path}", line {line}, in {function}\n    do()\n    ^^^^\n{error}\n'
    )
