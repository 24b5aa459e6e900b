from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.console import Console

from analyzers.numerics.loss.loss_spike import loss_spikes
from analyzers.numerics.loss.why_spike import SpikeError, explain
from analyzers.report.terminal.why_spike_text import render, tables
from analyzers.scope import Scope
from analyzers.wording import loss_text
from tests.analyzers.memory_store import MemoryStore
from tests.sentences import assert_plain


def run_with_spike(*, spike_step: int = 40, gradients: bool = True, replayed: bool = True) -> MemoryStore:
    """Four data ranks; at the step rank 2 alone has a bad part of the batch, and blocks.1 the gradient."""
    store = MemoryStore()
    rows: list[dict[str, Any]] = []
    for step in range(1, 50):
        for rank in range(4):
            bad = step == spike_step
            local = (8.0 if rank == 2 else 2.1) if bad else 2.0 + 0.01 * math.sin(step + rank)
            rows.append(
                {"attempt": 0, "rank": rank, "step": step, "start_ns": step * 10**8 + rank, "duration_ns": 10**8,
                 "loss": 3.575 if bad else 2.0 + 0.01 * math.sin(step), "grad_norm": 9.0 if bad else 1.0,
                 "local_loss": local, "committed": not bad, "batch_index": step - 1}
            )  # fmt: skip
    store.add("steps", rows)
    store.add("ranks", [{"attempt": 0, "rank": rank, "dp_shard": rank} for rank in range(4)])
    if gradients:
        store.add(
            "gradients",
            [
                {"attempt": 0, "rank": rank, "step": step, "parameter": f"blocks.{block}.mlp.up.weight",
                 "norm": 3.0 if step == spike_step and block == 1 else 1.0}
                for step in (10, 20, 30, spike_step) for rank in range(4) for block in range(3)
            ],
        )  # fmt: skip
    if replayed:
        for rank in range(4):
            samples = [{"id": 10 * rank + n, "loss": 20.0 if (rank, n) == (2, 1) else 2.0, "text": "\x1b[31mred"}
                       for n in range(2)]  # fmt: skip
            store.event("replay", rank=rank, step=spike_step, state="same", came_back=True, data_rank=rank,
                        num_samples=2, samples=samples)  # fmt: skip
    return store


@pytest.mark.parametrize("step", [None, 40])
def test_the_rank_the_sample_and_the_layer_that_made_it_come_first(step: int | None) -> None:
    found = explain(run_with_spike(), step)
    assert (found.step, found.batch_index, found.committed) == (40, 39, False)
    assert found.ranks[0].rank == 2
    assert found.ranks[0].jump_ratio == pytest.approx(6.0 / 6.3, abs=0.02)
    assert sum(rank.jump_ratio for rank in found.ranks) == pytest.approx(1.0)
    assert (found.samples[0].number, found.samples[0].data_rank) == (21, 2)
    assert found.samples[0].share_ratio == pytest.approx(20.0 / (3.575 * 8))
    assert (found.layers[0].name, found.layers[0].share_ratio) == ("blocks.1", pytest.approx(9 / 11))
    assert found.layers[0].factor == pytest.approx(9 / 11 * 3)
    assert found.unknown == ()
    assert "Rank 2 accounts for" in found.summary
    assert_plain(found.summary)


def test_one_of_two_ranks_that_made_the_whole_rise_is_named() -> None:
    store = run_with_spike()
    store.connection.execute("DELETE FROM steps WHERE rank < 2")
    store.connection.execute("DELETE FROM ranks WHERE rank < 2")
    found = explain(store, 40)
    assert [rank.rank for rank in found.ranks] == [2, 3]
    assert "Rank 2 accounts for 98 % of the rise." in found.summary, found.summary
    store.connection.execute("UPDATE steps SET local_loss = 7.5 WHERE rank = 3 AND step = 40")
    assert "All 2 data-parallel ranks rose about equally." in explain(store, 40).summary


def test_the_summary_is_in_the_singular_for_one_data_rank() -> None:
    store = run_with_spike()
    store.connection.execute("DELETE FROM steps WHERE rank > 0")
    store.connection.execute("DELETE FROM ranks WHERE rank > 0")
    assert explain(store, 40).summary.endswith("One data-parallel rank has a recorded loss.")


def test_a_spike_in_a_descent_rose_from_one_level_in_the_finding_and_in_its_explanation() -> None:
    """Step 40 runs again after a rollback to step 36, so a mean over both of its executions is the loss of neither."""
    store, executions = MemoryStore(), [*range(1, 41), *range(36, 60)]
    store.add(
        "steps",
        [
            {"attempt": 0, "rank": rank, "step": step, "start_ns": place * 10**8 + rank, "duration_ns": 10**8,
             "loss": loss, "local_loss": loss, "grad_norm": 9.0 if place == 39 else 1.0, "committed": place != 39}
            for place, step in enumerate(executions) for rank in range(2)
            for loss in [9.0 if place == 39 else 6.0 * 0.97**step + 0.001 * (place % 3)]
        ],
    )  # fmt: skip
    (finding,) = (one for one in loss_spikes(store, Scope()) if one.status == "fired")
    found = explain(store)
    assert (found.step, found.loss) == (finding.first_step, finding.evidence["loss"]) == (40, 9.0)
    assert found.loss_before == finding.evidence["loss_before"]
    assert [rank.loss_before for rank in found.ranks] == pytest.approx([found.loss_before] * 2, rel=1e-3)
    assert f"from {loss_text(found.loss_before)} to 9.0" in finding.summary


@pytest.mark.parametrize("first", [None, math.nan])
def test_an_execution_of_the_step_without_a_finite_loss_does_not_hide_the_next_one(first: float | None) -> None:
    """Step 40 is interrupted before its loss is known, or has a NaN, and runs again."""
    store = run_with_spike()
    store.add(
        "steps",
        [{"attempt": 0, "rank": rank, "step": 40, "start_ns": 40 * 10**8 - 10**7 + rank, "duration_ns": None,
          "loss": first, "local_loss": first, "committed": False} for rank in range(4)],
    )  # fmt: skip
    found = explain(store, 40)
    if first is None:
        assert (found.loss, found.ranks[0].rank) == (3.575, 2)
    else:  # a non-finite loss counts as the highest
        assert (math.isnan(found.loss), found.ranks) == (True, ())


def test_the_spike_of_one_attempt_is_explained_where_another_attempt_had_higher_losses() -> None:
    store = run_with_spike()
    store.add(
        "steps",
        [{"attempt": 1, "rank": rank, "step": step, "start_ns": (100 + step) * 10**8 + rank, "duration_ns": 10**8,
          "loss": 5.0 + 0.01 * math.sin(step), "local_loss": 5.0, "committed": True, "batch_index": step - 1}
         for step in range(1, 50) for rank in range(4)],
    )  # fmt: skip
    found = explain(store)
    assert (found.attempt, found.step, found.loss, found.ranks[0].rank) == (0, 40, 3.575, 2)


def test_missing_records_are_reported() -> None:
    found = explain(run_with_spike(gradients=False, replayed=False), 40)
    assert [line.partition(":")[0] for line in found.unknown] == ["Samples", "Layers"]
    for line in found.unknown:
        assert_plain(line)
    assert [title for title, _, _ in tables(found)] == ["Data ranks"]
    with pytest.raises(SpikeError, match="step 99"):
        explain(run_with_spike(), 99)
    with pytest.raises(SpikeError, match="No loss spike"):
        explain(run_with_spike(spike_step=99), None)
    with pytest.raises(SpikeError, match="No step"):
        explain(MemoryStore(), None)


def test_text_of_a_sample_is_never_obeyed_by_the_terminal() -> None:
    console = Console(width=110, no_color=True, record=True, file=io.StringIO())
    render(explain(run_with_spike()), console)
    text = console.export_text()
    assert "\x1b" not in text
    assert "red" in text
    assert "Layers" in text


def test_a_loss_that_did_not_rise_is_not_called_a_rise() -> None:
    first = explain(run_with_spike(), 1)
    assert first.summary == "Loss was 2.008 at step 1 on batch 0. No step before it has a loss to compare with."
    lower = explain(run_with_spike(), 5)
    assert lower.summary.startswith("Loss did not rise at step 5 on batch 4: it was 1.990, after a median of 2.00")
    for found in (first, lower):
        assert_plain(found.summary)
