"""Values that a loop logs, against what its ranks recorded: only a constant factor of the job is a contradiction."""

from __future__ import annotations

import math
import random

import pytest

from analyzers.finding import Finding
from analyzers.numerics.logged_values import contradicted_values
from analyzers.scope import Scope
from tests.analyzers.memory_store import MemoryStore
from tests.sentences import plain

RANKS = 8


def judged(
    *,
    loss: float = 1.0,
    norm: float = 1.0,
    tokens: float = 1.0,
    micro: int = 1,
    noise: float = 0.0,
    parts: bool = False,
) -> list[Finding]:
    """The findings of a run whose loop logs these multiples of what is right, with noise that changes by step."""
    store, generator = MemoryStore(), random.Random(0)
    steps, scalars, spans = [], [], []
    for step in range(1, 41):
        own = [generator.uniform(2, 3) for _ in range(RANKS)]
        global_norm = generator.uniform(0.5, 2)
        off = 1 + noise * generator.uniform(-1, 1)
        for rank in range(RANKS):
            place = {"attempt": 0, "rank": rank, "step": step}
            values = {"loss": off * loss * sum(own) / RANKS, "grad_norm": off * norm * global_norm}
            steps.append(place | values | {"local_loss": own[rank], "tokens": round(off * tokens * 4096)})
            part = ("grad_norm_part 8 of 0-7", global_norm / math.sqrt(RANKS)) if parts else (
                "measured_grad_norm", global_norm
            )  # fmt: skip
            scalars += [place | {"name": part[0], "value": part[1]}, place | {"name": "measured_tokens", "value": 4096}]
            spans += [place | {"kind": "forward", "microbatch": number} for number in range(micro)]
    store.add("steps", steps)
    store.add("scalars", scalars)
    store.add("spans", spans)
    return plain(contradicted_values(store, Scope()))


@pytest.mark.parametrize("parts", [False, True])
def test_correct_values_and_values_in_other_units_are_no_contradiction(parts: bool) -> None:
    assert judged(parts=parts) == []
    assert judged(loss=1 / math.log(2), parts=parts) == [], "bits are no contradiction"
    assert judged(loss=RANKS, norm=RANKS, tokens=RANKS, noise=0.3, parts=parts) == [], "smoothed, or without padding"


@pytest.mark.parametrize("parts", [False, True])
def test_a_norm_of_one_shard_is_a_root_of_the_ranks_too_small(parts: bool) -> None:
    (finding,) = judged(norm=1 / math.sqrt(RANKS), parts=parts)
    assert (finding.kind, finding.cause) == ("logged_value", "grad_norm")
    assert "1/2.83 of" in finding.summary
    assert "the root of the number of ranks" in finding.summary


@pytest.mark.parametrize(
    ("values", "cause", "words"),
    [
        ({"loss": RANKS}, "loss", "8 times what its ranks recorded: the factor is the number of ranks"),
        ({"loss": 1 / 4, "micro": 4}, "loss", "1/4 of what its ranks recorded: the factor is the number of micro"),
        ({"tokens": RANKS}, "tokens", "8 times what"),
        ({"tokens": 1 / 4, "micro": 4}, "tokens", "1/4 of what"),
    ],
)
def test_a_factor_of_the_job_is_named(values: dict[str, float], cause: str, words: str) -> None:
    (finding,) = judged(**values)  # type: ignore[arg-type]
    assert finding.cause == cause
    assert words in finding.summary
