"""Explain a loss spike: the batch, data ranks, samples and layers that caused it, and what is not known.

    spike = explain(source, step=45)        # None: the worst spike of the run
    spike.samples[0].text, spike.ranks[0].jump_ratio, spike.layers[0].factor, spike.unknown

1. If the step ran again after a rollback, take the execution with the highest loss. Compare it with the level before
   the spike as given in the spike's finding. If there is no finding, compare it with the median loss of the
   `LEVEL_WINDOW` committed steps before it.
2. Data ranks: the loss of each at the step minus its earlier median, and its share of the total rise. Ranks that read
   the same rows count once.
3. Samples: the loss of each sequence from the replay of a refused step (`analyzers.numerics.replay_result`), and its
   share of the batch's loss.
4. Layers: the share of each block in the squared gradient norm, against its median share in earlier sampled steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from analyzers.finding import Finding, evidence_of
from analyzers.numerics.gradient_flow import block_of
from analyzers.numerics.loss.loss_spike import loss_spikes
from analyzers.numerics.replay_result import REPLAY_EVENTS, ReplayResult, find_replay
from analyzers.policy import SHARED
from analyzers.run.records.event_log import EventLog
from analyzers.scope import Scope
from analyzers.source import Source, missing_tables
from analyzers.wording import loss_text
from probes.guard.signed_loss import LEVEL_WINDOW

__all__ = ["LayerShare", "RankShare", "SampleShare", "SpikeError", "WhySpike", "explain"]


class SpikeError(ValueError):
    """There is nothing to explain; the text is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """A data rank's loss (nat), its earlier median, and its share of the rise over all data ranks."""

    rank: int
    loss: float
    loss_before: float
    jump_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleShare:
    """One sequence. `loss` is None if not finite; `share_ratio` is its share of the batch's loss, None if that is not
    finite."""

    number: int
    data_rank: int
    loss: float | None
    share_ratio: float | None
    place: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShare:
    """A block's share of the squared gradient norm, its earlier share, and the ratio of the two."""

    name: str
    share_ratio: float
    share_before_ratio: float
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WhySpike:
    """The explanation of a spike; in each list the largest contribution comes first."""

    attempt: int
    step: int
    loss: float
    loss_before: float
    batch_index: int | None
    committed: bool | None
    replay_verdict: str
    ranks: tuple[RankShare, ...]
    samples: tuple[SampleShare, ...]
    num_samples: int
    layers: tuple[LayerShare, ...]
    unknown: tuple[str, ...]

    @property
    def summary(self) -> str:
        """Two sentences: the jump, and the rank that made it."""
        batch = f" on batch {self.batch_index}" if self.batch_index is not None else ""
        at, loss = f"at step {self.step}{batch}", loss_text(self.loss)
        if math.isnan(self.loss_before):
            return f"Loss was {loss} {at}. No step before it has a loss to compare with."
        if self.loss <= self.loss_before:
            return f"Loss did not rise {at}: it was {loss}, after a median of {loss_text(self.loss_before)}."
        jump = f"Loss rose from its median of {loss_text(self.loss_before)} to {loss} {at}."
        if not self.ranks:
            return f"{jump} The losses of single ranks are not recorded."
        largest, *others = self.ranks
        if others and largest.jump_ratio > SHARED.doubled_factor * fmean(rank.jump_ratio for rank in others):
            return f"{jump} Rank {largest.rank} accounts for {100 * largest.jump_ratio:.0f} % of the rise."
        if len(self.ranks) == 1:
            return f"{jump} One data-parallel rank has a recorded loss."
        return f"{jump} All {len(self.ranks)} data-parallel ranks rose about equally."

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"summary": self.summary}


def explain(source: Source, step: int | None = None) -> WhySpike:
    """Explain a step, or the worst spike. Raises SpikeError if there is none, or the step was not recorded."""
    if missing_tables(source, "steps"):
        raise SpikeError("No step is recorded.")
    attempt, step, start_ns, batch_index, committed, loss = _chosen(source, step)
    execution = _execution(source, attempt, step, start_ns)
    spike = _spike_at(source, attempt, step, loss)
    if spike is not None:
        loss = _mean_loss(source, attempt, step, execution)
        before = float(evidence_of(spike)["loss_before"])
    else:
        before = _level_before(source, attempt, start_ns)
    since = step if spike is None or spike.first_step is None else spike.first_step
    replayed = find_replay(EventLog.load(source, REPLAY_EVENTS), attempt=attempt, step=step, execution=execution)
    ranks = _ranks(source, attempt, step, execution, since)
    layers = _layers(source, attempt, step)
    unknown = []
    if not ranks:
        unknown.append("Data ranks: no loss of single ranks is recorded.")
    if replayed is None:
        unknown.append("Samples: this step was not replayed (refused steps are, up to `recovery.max_replays`).")
    elif not replayed.samples:
        unknown.append("Samples: the replay had no logits.")
    elif len(replayed.samples) < replayed.num_samples:
        unknown.append(f"{replayed.num_samples - len(replayed.samples)} more samples: each rank reports its worst few.")
    if not layers:
        unknown.append("Layers: gradients were not sampled at this step, or not before (probes.gradient_interval).")
    return WhySpike(
        attempt=attempt,
        step=step,
        loss=loss,
        loss_before=before,
        batch_index=batch_index,
        committed=committed,
        replay_verdict=replayed.replay_verdict if replayed else "",
        ranks=ranks,
        samples=_samples(replayed, loss) if replayed else (),
        num_samples=replayed.num_samples if replayed else 0,
        layers=layers,
        unknown=tuple(unknown),
    )


def _chosen(source: Source, step: int | None) -> tuple[int, int, int, int | None, bool | None, float]:
    """The execution of a step with the highest loss; a non-finite loss counts as highest."""
    attempt = None
    if step is None:
        found = [finding for finding in loss_spikes(source, Scope()) if finding.status == "fired"]
        if not found:
            raise SpikeError("No loss spike was found in this run. Name a step: --why-spike STEP.")
        worst = max(found, key=lambda finding: evidence_of(finding)["loss_z"])
        assert worst.first_step is not None
        step, attempt = worst.first_step, worst.attempt
    rows = source.rows(
        "SELECT attempt, step, start_ns, batch_index, committed, loss FROM steps WHERE step = $1 AND loss IS NOT NULL "
        "AND attempt = coalesce($2, attempt) ORDER BY isfinite(loss), loss DESC, rank LIMIT 1",
        [step, attempt],
    )
    if not rows:
        raise SpikeError(f"No loss is recorded for step {step}.")
    attempt, number, start_ns, batch_index, committed, loss = rows[0]
    return attempt, number, start_ns, batch_index, committed, float(loss)


def _spike_at(source: Source, attempt: int, step: int, loss: float) -> Finding | None:
    """The finding of the spike that a step belongs to, if there is one."""
    if not math.isfinite(loss):
        return None
    found = [one for one in loss_spikes(source, Scope()) if one.status == "fired" and one.attempt == attempt]
    return next((one for one in found if (one.first_step or 0) <= step <= (one.last_step or -1)), None)


def _mean_loss(source: Source, attempt: int, step: int, execution: int) -> float:
    """Mean loss over the ranks in one execution of a step: the value that the detector judged."""
    ((loss,),) = source.rows(
        """
        WITH own AS (
            SELECT loss FROM steps WHERE attempt = ? AND step = ? AND loss IS NOT NULL
            QUALIFY row_number() OVER (PARTITION BY rank ORDER BY start_ns) = ? + 1
        ) SELECT avg(loss) FROM own
        """,
        [attempt, step, execution],
    )
    return float(loss)


def _execution(source: Source, attempt: int, step: int, start_ns: int) -> int:
    """Index (from 0) of this execution among the step's executions with a loss, on the rank that reports it."""
    ((execution,),) = source.rows(
        "SELECT count(loss) FROM steps WHERE attempt = ? AND step = ? AND start_ns < ? AND rank = "
        "(SELECT min(rank) FROM steps WHERE attempt = ? AND step = ? AND start_ns = ?)",
        [attempt, step, start_ns, attempt, step, start_ns],
    )
    return int(execution)


def _level_before(source: Source, attempt: int, start_ns: int) -> float:
    """Median loss of the committed steps before; NaN if there are none."""
    rows = source.rows(
        "SELECT loss FROM steps WHERE attempt = ? AND start_ns < ? AND committed AND isfinite(loss) AND rank = "
        "(SELECT min(rank) FROM steps WHERE attempt = ? AND loss IS NOT NULL) ORDER BY start_ns DESC LIMIT ?",
        [attempt, start_ns, attempt, LEVEL_WINDOW],
    )
    return median(float(loss) for (loss,) in rows) if rows else math.nan


def _ranks(source: Source, attempt: int, step: int, execution: int, since: int) -> tuple[RankShare, ...]:
    """Shares of the data ranks. `since`: first step of the spike; the losses before that step were usual."""
    rows = source.rows(
        """
        WITH own AS (
            SELECT rank, start_ns, local_loss FROM steps
            WHERE attempt = ? AND step = ? AND coalesce(loss, local_loss) IS NOT NULL
            QUALIFY row_number() OVER (PARTITION BY rank ORDER BY start_ns) = ? + 1 AND isfinite(local_loss)
        ), earlier AS (
            SELECT s.rank, s.local_loss FROM steps s JOIN own USING (rank)
            WHERE s.attempt = ? AND s.committed AND s.step < ? AND s.start_ns < own.start_ns AND isfinite(s.local_loss)
            QUALIFY row_number() OVER (PARTITION BY s.rank ORDER BY s.start_ns DESC) <= ?
        )
        SELECT own.rank, any_value(own.local_loss), median(earlier.local_loss) FROM own JOIN earlier USING (rank)
        GROUP BY own.rank ORDER BY own.rank
        """,
        [attempt, step, execution, attempt, since, LEVEL_WINDOW],
    )
    same_rows = _data_ranks(source, attempt)
    seen: dict[Any, tuple[int, float, float]] = {}
    for rank, loss, before in rows:
        seen.setdefault(same_rows.get(rank, rank), (rank, float(loss), float(before)))
    rises = {rank: max(0.0, loss - before) for rank, loss, before in seen.values()}
    total = sum(rises.values())
    shares = [
        RankShare(rank=rank, loss=loss, loss_before=before, jump_ratio=rises[rank] / total if total else 0.0)
        for rank, loss, before in seen.values()
    ]
    return tuple(sorted(shares, key=lambda share: -share.jump_ratio))


def _data_ranks(source: Source, attempt: int) -> Mapping[int, Any]:
    """{rank: key that is equal for ranks that read the same part of the same rows}."""
    if not source.has("ranks"):
        return {}
    rows = source.rows(
        "SELECT rank, coalesce(max(dp_replicate), 0), coalesce(max(dp_shard), 0), coalesce(max(ep), 0), "
        "coalesce(max(cp), 0) FROM ranks "
        "WHERE attempt = ? GROUP BY rank HAVING max(dp_replicate) IS NOT NULL OR max(dp_shard) IS NOT NULL",
        [attempt],
    )
    return {rank: ("data", *place) for rank, *place in rows}


def _samples(replayed: ReplayResult, loss: float) -> tuple[SampleShare, ...]:
    whole = loss * replayed.num_samples
    known = math.isfinite(whole) and whole > 0
    return tuple(
        SampleShare(
            number=sample.number,
            data_rank=sample.data_rank,
            loss=sample.loss,
            share_ratio=sample.loss / whole if known and sample.loss is not None else None,
            place=sample.place,
            text=sample.text,
        )
        for sample in replayed.samples
    )


def _layers(source: Source, attempt: int, step: int) -> tuple[LayerShare, ...]:
    if missing_tables(source, "gradients"):
        return ()
    rows = source.rows(
        """
        WITH steps_before AS (
            SELECT DISTINCT step FROM gradients WHERE attempt = ? AND step <= ? ORDER BY step DESC LIMIT ?
        ), once AS (
            SELECT step, rank, parameter, max(norm) AS norm FROM gradients SEMI JOIN steps_before USING (step)
            WHERE attempt = ? AND isfinite(norm) GROUP BY ALL
        )
        SELECT step, parameter, sum(norm * norm) FROM once GROUP BY step, parameter
        """,
        [attempt, step, SHARED.history + 1, attempt],
    )
    squares: dict[int, dict[str, float]] = {}
    for sampled, parameter, square in rows:
        blocks = squares.setdefault(sampled, {})
        name = block_of(parameter or "") or (parameter or "?").partition(".")[0]
        blocks[name] = blocks.get(name, 0.0) + float(square)
    shares = {sampled: _shares(blocks) for sampled, blocks in squares.items()}
    now = shares.pop(step, {})
    if not now or not shares:
        return ()
    found = []
    for name, share in now.items():
        before = median(blocks.get(name, 0.0) for blocks in shares.values())
        factor = share / before if before else math.inf
        found.append(LayerShare(name=name, share_ratio=share, share_before_ratio=before, factor=factor))
    return tuple(sorted(found, key=lambda layer: layer.share_before_ratio - layer.share_ratio))


def _shares(blocks: Mapping[str, float]) -> dict[str, float]:
    total = sum(blocks.values())
    return {name: square / total for name, square in blocks.items()} if total else {}
