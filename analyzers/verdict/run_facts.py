"""Plain facts of a run for the head of a report: ranks, steps, attempts, times, throughput, rollbacks.

facts = run_facts(source, run.manifest())
facts["num_ranks"], facts["steps"], facts["tokens_per_s"]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from analyzers.account.long_run import Views, whole_views
from analyzers.account.named_phases import named_phases
from analyzers.checkpoints.interval import suggest
from analyzers.health.utilisation import flops_per_token, mfu, why_not_judged
from analyzers.numerics.loss.learning import loss_fall
from analyzers.numerics.policy_loss import policy_attempts
from analyzers.profiling.captures import EVENTS as PROFILE_EVENTS
from analyzers.profiling.captures import captures
from analyzers.run.calls.snapshot import attempts
from analyzers.run.ends.run_ends import run_ends
from analyzers.run.records.evaluations import evaluations
from analyzers.run.records.event_log import Event, EventLog
from analyzers.run.records.file_problems import file_problems
from analyzers.run.records.newest_steps import whole_pace
from analyzers.run.records.standstills import before_standstill, standstills
from analyzers.run.records.token_copies import token_copies
from analyzers.settings.plan_deviation import plan_deviations
from analyzers.source import Source
from analyzers.verdict.rank_facts import rank_facts
from probes.settings.described import RunFacts
from probes.settings.section import read
from probes.settings.sections import AlertsSettings
from probes.tape import event_kinds

__all__ = ["run_facts"]


def run_facts(source: Source, manifest: Mapping[str, Any], views: Views | None = None) -> dict[str, Any]:
    """The facts as JSON values; None for a fact that was not recorded."""
    views = views or whole_views(source)
    log = EventLog.load(
        source,
        (
            event_kinds.ROLLBACK,
            event_kinds.RUN_STARTED,
            event_kinds.RUN_ENDED,
            event_kinds.FAULT_INJECTED,
            event_kinds.RANK_CLOSED,
            event_kinds.PREEMPTED,
            event_kinds.EXCLUDED,
        ),
    )
    ended = run_ends(log, last_ns=_newest_ns(source))
    facts: dict[str, Any] = {
        "run_id": _text(manifest.get("run_id")),
        "name": _text(read(RunFacts, manifest).name),
        "attempts": len(attempts(views.sampled)),
        "ended": ended[-1].text("reason") if ended else None,
        "preempted_at_step": _preempted_at(log) if ended and ended[-1].text("reason") == "preempted" else None,
        **_unstarted(source, log, ended),
        **rank_facts(source),
        **_steps(source, views),
    }
    if address := read(AlertsSettings, manifest).dashboard_url:
        facts["dashboard_url"] = address
    facts |= _utilisation(manifest, facts)
    facts["named_phases"] = [
        {"name": one.name, "own_ms": _round(one.own_ms, 3), "share_ratio": _round(one.share_ratio, 4)}
        for one in named_phases(views.whole)
    ]
    facts["validation"] = _validation(source)
    facts["rollbacks"] = [
        {"attempt": e.attempt, "from_step": e.integer("from_step"), "to_step": e.integer("to_step"),
         "tier": e.text("tier"), "reason": e.text("reason"), "skipped_batches": e.integers("skipped_batches"),
         "replayed_batches": e.integers("replayed_batches"),
         "duration_s": e.number("duration_s")}
        for e in log.of(event_kinds.ROLLBACK)
    ]  # fmt: skip
    facts["excluded"] = [
        {
            "device": e.text("device"),
            "node_rank": e.integer("node_rank"),
            "attempt": e.attempt,
            "reason": e.text("reason"),
        }
        for e in log.of(event_kinds.EXCLUDED)
    ]
    facts["faults_injected"] = [
        {"fault": e.text("fault"), "rank": e.rank, "step": e.step} for e in log.of(event_kinds.FAULT_INJECTED)
    ]
    facts["captures"] = captures(EventLog.load(source, PROFILE_EVENTS))
    interval = suggest(views.histories, manifest)
    facts["checkpoint_interval"] = None if interval is None else asdict(interval)
    facts["plan_deviations"] = [
        {
            "what": each.what,
            "planned_bytes": each.planned_bytes,
            "measured_bytes": each.measured_bytes,
            "as_planned": each.as_planned,
        }
        for each in plan_deviations(views.histories, manifest)
    ]
    facts["probe_errors"], facts["dropped_records"] = _errors_and_drops(log)
    facts["file_problems"] = file_problems(source)
    return facts


def _newest_ns(source: Source) -> int:
    """Start of the newest step of any rank (epoch nanoseconds)."""
    return int(source.rows("SELECT max(start_ns) FROM steps")[0][0] or 0) if source.has("steps") else 0


def _utilisation(manifest: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The model's FLOP/s and MFU, or the reason why the MFU was not judged."""
    tokens_per_s, operations = facts["tokens_per_s"], flops_per_token(manifest)
    missing = why_not_judged(manifest) or (None if tokens_per_s else "no tokens are recorded")
    found: dict[str, Any] = {"model_tflops_per_s": None, "mfu_ratio": None, "mfu_not_judged": missing}
    if tokens_per_s and operations is not None:
        share = mfu(
            manifest, tokens_per_s=tokens_per_s, num_devices=max([facts["num_ranks"] or 1, *facts["num_ranks_before"]])
        )
        found |= {"model_tflops_per_s": _round(tokens_per_s * operations / 1e12, 6), "mfu_ratio": _round(share, 4)}
    return found


def _unstarted(source: Source, log: EventLog, ended: Sequence[Event]) -> dict[str, Any]:
    """Facts about the end of a launch in which no rank recorded anything; empty for any other launch."""
    if not log.of(event_kinds.RUN_STARTED) or attempts(source):
        return {}
    last = ended[-1] if ended else None
    code = last.detail.get("exit_code") if last else None  # null for a launcher that was killed
    return {
        "no_rank_started": True,
        "exit_code": code if isinstance(code, int) else None,
        "end_message": last.text("message") or None if last else None,
    }


def _preempted_at(log: EventLog) -> int | None:
    """Step of the checkpoint that was saved when the run was preempted; None if there was no time for one."""
    found = [event.integer("checkpoint_step") for event in log.of(event_kinds.PREEMPTED)]
    return found[-1] if found and found[-1] >= 0 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _steps(source: Source, views: Views) -> dict[str, Any]:
    facts: dict[str, Any] = dict.fromkeys(
        ("steps", "wall_s", "step_ms_median", "tokens", "tokens_per_s", "first_loss", "last_loss", "loss_lost_at_step")
    )
    if not views.whole.has("steps"):
        return facts
    finished = before_standstill(standstills(source))
    ((steps, wall_s),) = views.sampled.rows(
        f"""
        SELECT max(step) FILTER ({finished}), (max(start_ns + coalesce(duration_ns, 0)) - min(start_ns)) / 1e9
        FROM steps
        """
    )
    pace = whole_pace(views.whole, sampled=views.sampled, copies=token_copies(views.whole))
    facts |= {"steps": steps, "wall_s": _round(wall_s, 3), "step_ms_median": _round(pace["step_ms"], 3)}
    facts |= {"tokens": int(pace["tokens"]) if pace["tokens"] else None}
    facts["tokens_per_s"] = _round(pace["tokens_per_s"], 1)
    return facts | _learning(views.histories)


def _validation(source: Source) -> dict[str, Any] | None:
    """The lowest and the last validation loss; None if there was no evaluation."""
    found = evaluations(source)
    if not found:
        return None
    lowest = min(found, key=lambda each: each.loss)
    return {
        "evaluations": len(found),
        "last_loss": _round(found[-1].loss, 5),
        "last_step": found[-1].step,
        "lowest_loss": _round(lowest.loss, 5),
        "lowest_step": lowest.step,
    }


def _learning(source: Source) -> dict[str, Any]:
    """First and last finite loss of the committed steps that ended, and the fall of the loss in units of its noise.

    `loss_lost_at_step`: the step from which no loss was finite until the end. For a policy's loss no fall is given,
    because it does not measure progress.
    """
    rows = source.rows(
        """
        SELECT step, loss, duration_ns IS NOT NULL FROM steps
        WHERE loss IS NOT NULL AND committed AND rank = (SELECT min(rank) FROM steps WHERE loss IS NOT NULL)
        ORDER BY attempt, start_ns
        """
    )
    # A step that did not end is no step of the run, unless no step has a duration: then only losses were read.
    ended = [row for row in rows if row[2]] or rows
    losses = [float(loss) for _, loss, _ in ended if math.isfinite(loss)]
    lost = list(itertools.takewhile(lambda row: not math.isfinite(row[1]), reversed(rows)))
    fall = None if policy_attempts(source) else loss_fall(losses)
    return {
        "first_loss": _round(losses[0], 5) if losses else None,
        "last_loss": _round(losses[-1], 5) if losses else None,
        "loss_lost_at_step": lost[-1][0] if lost else None,
        "loss_drop": _round(fall.drop_nat, 5) if fall else None,
        "loss_noise": _round(fall.noise_nat, 5) if fall else None,
        "loss_drop_in_noise": _round(fall.margin_ratio, 2) if fall and fall.noise_nat else None,
    }


def _errors_and_drops(log: EventLog) -> tuple[dict[str, int], dict[str, int]]:
    """Probe errors and dropped records by name, as counted by the ranks that closed."""
    errors: dict[str, int] = {}
    dropped: dict[str, int] = {}
    for event in log.of(event_kinds.RANK_CLOSED):
        for key, total in (("probe_errors", errors), ("dropped_records", dropped)):
            counts = event.detail.get(key)
            for name, count in counts.items() if isinstance(counts, dict) else ():
                if isinstance(count, int):
                    total[str(name)] = total.get(str(name), 0) + count
    return errors, dropped


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(float(value), digits)
