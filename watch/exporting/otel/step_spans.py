"""Spans of finished steps, their phases and collectives, read from the store.

    cursor = StepSpans(run_id="demo", group="per_step", ranks="single_rank")
    for span in cursor.take(store): ...            # spans of steps that ended since the last call

All ranks of a step share a trace, whose id is a hash of run, attempt and step that every node can compute. The root of
the trace is the span of the step, which the first node sends.

* Groups: `default` has a span per step and rank, with its time account (own work, waiting, not measured, in seconds);
  `per_step` adds its phases and the gaps between them; `all` adds the recorded spans (microbatches, stages) and
  collectives.
* Ranks: `single_rank` (the smallest), `first_rank_per_node`, `sampled` (eight, evenly spaced), `all_ranks`. The choice
  does not change within an attempt, even if ranks appear later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from analyzers.account.time_classes import NOT_MEASURED, OWN_WORK, WAITED
from analyzers.figures.drawing.spaced_sample import spaced_sample

__all__ = ["GROUPS", "RANKS", "SAMPLED_RANKS", "SpanRow", "StepSpans"]

GROUPS = ("default", "per_step", "all")
RANKS = ("single_rank", "first_rank_per_node", "sampled", "all_ranks")
_PLACES = (
    "data", "before_forward", "forward", "forward_to_backward", "backward", "backward_to_optimizer", "optimizer",
    "after_optimizer", "checkpoint", "evaluate",
)  # fmt: skip
_ACCOUNT = {
    "own_work": OWN_WORK,
    "waiting": f"CASE WHEN collective_wait_ns IS NOT NULL THEN {WAITED} END",
    "not_measured": NOT_MEASURED,
}
SAMPLED_RANKS = 8
MAX_STEPS = 200
"""Steps per call; the next call returns more."""
MAX_ROWS = 20_000
"""Maximum spans, and maximum collectives, per call; further ones of these steps are not exported."""


class Rows(Protocol):
    """Anything that answers SQL queries."""

    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRow:
    """One span. Ids are integers as in OpenTelemetry (128 and 64 bits); times are epoch nanoseconds."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None
    start_ns: int
    end_ns: int
    attributes: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    is_error: bool = False


class StepSpans:
    """A cursor over the steps of a run, per attempt."""

    def __init__(self, *, run_id: str, group: str, ranks: str, is_first_node: bool = True) -> None:
        self._run_id, self._group, self._strategy, self._roots = run_id, group, ranks, is_first_node
        self._done: dict[int, int] = {}  # attempt -> start of the newest step already returned, epoch ns
        self._sent: dict[int, list[int]] = {}  # attempt -> ranks chosen for the returned steps

    def take(self, source: Rows) -> list[SpanRow]:
        """Return the spans of steps that have finished on all chosen ranks since the last call."""
        found = source.rows("SELECT max(attempt) FROM steps WHERE rank >= 0")
        if not found or found[0][0] is None:
            return []
        attempt = int(found[0][0])
        ranks = self._chosen(source, attempt)
        if not ranks:
            return []
        marks = ", ".join("?" * len(ranks))
        steps = source.rows(
            f"""
            SELECT step, min(start_ns), max(start_ns + duration_ns) FROM steps
            WHERE attempt = ? AND rank IN ({marks}) AND start_ns > ?
            GROUP BY step HAVING count(*) FILTER (duration_ns IS NOT NULL) >= ?
            ORDER BY 2 LIMIT ?
            """,
            [attempt, *ranks, self._done.get(attempt, 0), len(ranks), MAX_STEPS],
        )
        if not steps:
            return []
        spans: list[SpanRow] = []
        for step, start_ns, end_ns in steps:
            if self._roots:
                trace, root = self._trace(attempt, step), self._root(attempt, step)
                about = {"rankscope.step": step, "rankscope.attempt": attempt}
                spans.append(SpanRow(name="train.step", trace_id=trace, span_id=root, parent_id=None, start_ns=start_ns,
                                     end_ns=end_ns, attributes=about))  # fmt: skip
        numbers = [row[0] for row in steps]
        since, until = min(row[1] for row in steps), max(row[2] for row in steps)
        spans += self._rank_spans(source, attempt, ranks, numbers, since)
        if self._group == "all":
            spans += self._inner_spans(source, attempt, ranks, since, until)
        self._done[attempt], self._sent[attempt] = max(row[1] for row in steps), ranks
        return spans

    def _chosen(self, source: Rows, attempt: int) -> list[int]:
        rows = source.rows(
            "SELECT rank, any_value(node_rank) FROM ranks WHERE attempt = ? AND rank >= 0 GROUP BY rank ORDER BY rank",
            [attempt],
        )
        if self._strategy == "all_ranks":
            return [int(rank) for rank, _ in rows]
        # Keep the ranks chosen before. `_done` is the newest start of the last exported step among these ranks. A
        # newly chosen rank may have started that step later, and would then export the step a second time.
        sent = self._sent.get(attempt, [])
        rows.sort(key=lambda row: row[0] not in sent)
        ranks = [int(rank) for rank, _ in rows]
        if self._strategy == "single_rank":
            return ranks[:1] if self._roots else []
        if self._strategy == "first_rank_per_node":
            first_of: dict[int, int] = {}
            for rank, node in rows:
                first_of.setdefault(node, int(rank))
            return list(first_of.values())
        return [*sent, *spaced_sample(ranks[len(sent) :], SAMPLED_RANKS - len(sent))]

    def _rank_spans(
        self, source: Rows, attempt: int, ranks: Sequence[int], steps: Sequence[int], since_ns: int
    ) -> Iterator[SpanRow]:
        values = "loss, grad_norm, tokens, committed"
        account = (f"{sql} AS {name}" for name, sql in _ACCOUNT.items())
        columns = ", ".join((values, *account, *(f"{place}_ns" for place in _PLACES)))
        marks = ", ".join("?" * len(ranks))
        for rank, step, start_ns, took_ns, loss, norm, tokens, committed, *spent in source.rows(
            f"SELECT rank, step, start_ns, duration_ns, {columns} "
            f"FROM steps WHERE attempt = ? AND rank IN ({marks}) AND start_ns >= ? AND step BETWEEN ? AND ? "
            "AND duration_ns IS NOT NULL ORDER BY start_ns, rank",
            [attempt, *ranks, since_ns, min(steps), max(steps)],
        ):
            attributes: dict[str, str | int | float | bool] = {"rankscope.rank": rank, "rankscope.step": step}
            recorded = {"loss": loss, "grad_norm": norm, "tokens": tokens, "committed": committed}
            attributes |= {f"rankscope.{name}": value for name, value in recorded.items() if value is not None}
            classes, places = spent[: len(_ACCOUNT)], spent[len(_ACCOUNT) :]
            known = ((name, ns) for name, ns in zip(_ACCOUNT, classes, strict=True) if ns is not None)
            attributes |= {f"rankscope.{name}": ns / 1e9 for name, ns in known}
            trace, span_id = self._trace(attempt, step), self._id("rank", attempt, step, rank, start_ns)
            yield SpanRow(name=f"rank {rank}", trace_id=trace, span_id=span_id, parent_id=self._root(attempt, step),
                          start_ns=start_ns, end_ns=start_ns + took_ns, attributes=attributes,
                          is_error=committed is False)  # fmt: skip
            if self._group == "default":
                continue
            at_ns = start_ns  # phases are laid out one after another; their exact starts are in the recorded spans
            for place, place_ns in zip(_PLACES, places, strict=True):
                if place_ns:
                    yield SpanRow(name=place, trace_id=trace, span_id=self._id(place, span_id), parent_id=span_id,
                                  start_ns=at_ns, end_ns=at_ns + place_ns,
                                  attributes={"rankscope.rank": rank})  # fmt: skip
                    at_ns += place_ns

    def _inner_spans(
        self, source: Rows, attempt: int, ranks: Sequence[int], since_ns: int, until_ns: int
    ) -> Iterator[SpanRow]:
        marks = ", ".join("?" * len(ranks))
        limits = [attempt, *ranks, since_ns, until_ns, MAX_ROWS]
        collectives = source.rows(
            f"SELECT rank, step, op, process_group, seq, bytes, issue_ns, end_ns FROM collectives WHERE attempt = ? "
            f"AND rank IN ({marks}) AND issue_ns BETWEEN ? AND ? AND end_ns IS NOT NULL AND step IS NOT NULL "
            "ORDER BY issue_ns LIMIT ?",
            limits,
        )
        inner = source.rows(
            f"SELECT rank, step, kind, microbatch, stage, start_ns, end_ns FROM spans WHERE attempt = ? "
            f"AND rank IN ({marks}) AND start_ns BETWEEN ? AND ? AND end_ns IS NOT NULL AND microbatch IS NOT NULL "
            "ORDER BY start_ns LIMIT ?",
            limits,
        )
        for rank, step, op, group, seq, num_bytes, start_ns, end_ns in collectives:
            yield SpanRow(name=str(op), trace_id=self._trace(attempt, step), parent_id=self._root(attempt, step),
                          span_id=self._id("collective", attempt, rank, group, op, seq, start_ns),
                          start_ns=start_ns, end_ns=end_ns,
                          attributes={"rankscope.rank": rank, "rankscope.process_group": str(group),
                                      "rankscope.seq": seq, "rankscope.bytes": num_bytes or 0})  # fmt: skip
        for rank, step, kind, microbatch, stage, start_ns, end_ns in inner:
            attributes = {"rankscope.rank": rank, "rankscope.microbatch": microbatch}
            if stage is not None:
                attributes["rankscope.stage"] = stage
            yield SpanRow(name=str(kind), trace_id=self._trace(attempt, step), parent_id=self._root(attempt, step),
                          span_id=self._id("span", attempt, rank, kind, microbatch, stage, start_ns),
                          start_ns=start_ns, end_ns=end_ns, attributes=attributes)  # fmt: skip

    def _trace(self, attempt: int, step: int) -> int:
        return self._id("trace", attempt, step, num_bytes=16)

    def _root(self, attempt: int, step: int) -> int:
        return self._id("root", attempt, step)

    def _id(self, *parts: object, num_bytes: int = 8) -> int:
        """Hash of the run and these parts. Every node computes the same value."""
        text = "\x1f".join(map(str, (self._run_id, *parts))).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=num_bytes).digest()) or 1  # 0 is not an id
