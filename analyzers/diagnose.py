"""Everything that the analyzers say of a run, and one sentence on top.

    with Store.open(run) as store:
        diagnosis = diagnose(store, run.manifest(), stacks_dir=run.stacks)
    diagnosis.verdict          # "rank 3 is a straggler since step 60: ..."
    diagnosis.fired            # findings that name something wrong, the worst first

An analyzer that fails costs its own finding (`insufficient_data`, with the error), never the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from analyzers.account import goodput
from analyzers.account.long_run import Views, look, unpicked
from analyzers.checkpoints import analyze as checkpoints
from analyzers.communication import analyze as communication
from analyzers.corruption import analyze as corruption
from analyzers.corruption import gradient_outlier
from analyzers.data import analyze as data_wait
from analyzers.deaths import analyze as rank_lost
from analyzers.deaths import node_exclusion as exclusion
from analyzers.deaths import resume_mismatch as resume
from analyzers.finding import SEVERITIES, Finding, Severity
from analyzers.hangs import analyze as hang
from analyzers.hangs import silent_node
from analyzers.health import analyze as health
from analyzers.memory import analyze as memory
from analyzers.numerics import divergence, expert_load, gradient_flow, gradient_noise, loss_scale, loss_spike, nonfinite
from analyzers.pipeline import analyze as stage_balance
from analyzers.report.run_facts import run_facts
from analyzers.run import coverage
from analyzers.run.stall_limits import StallPolicy
from analyzers.settings import analyze as configuration
from analyzers.settings import startup
from analyzers.source import Source
from analyzers.stragglers import analyze as straggler
from analyzers.stragglers import throughput
from analyzers.whatif import what_if as whatif

__all__ = ["SCHEMA_VERSION", "Diagnosis", "conclude", "diagnose", "reaches", "stall_policy"]

SCHEMA_VERSION = 1
"""Of the JSON report: raised when a reader of the former version would misread it."""
_STATUS_ORDER = {"fired": 0, "suspect": 1, "advice": 2, "ok": 3, "insufficient_data": 4}
_SEGMENT = re.compile(r"\.\d+\.tape$")
_KIND_ORDER = {
    kind: place
    for place, kind in enumerate(
        (
            "rank_lost",
            "hang",
            "xid",
            "gpu_memory_errors",
            "replica_mismatch",
            "fingerprint_chain_broken",
            "gradient_corrupted",
            "excluded",
            "node_silent",
            "resume_differs",
            "non_finite",
            "loss_spike",
            "divergence",
            "loss_scale_collapse",
            "expert_imbalance",
            "exploding_gradients",
            "vanishing_gradients",
            "gpu_throttled",
            "link_errors",
            "straggler",
            "checkpoint_failed",
            "memory_growth",
            "memory_limit",
            "data_bound",
            "stage_imbalance",
            "throughput",
            "checkpoint_age",
        )
    )
}
"""Of findings that are equally bad: what explains others first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A run's facts, one sentence, and all findings, the most severe first."""

    run: Mapping[str, Any]
    verdict: str
    findings: tuple[Finding, ...]
    goodput: goodput.Account | None = None
    """Where the wall time went; None where no step was recorded."""
    what_if: whatif.WhatIf | None = None
    """What stragglers cost the job; None with one rank or too few steps."""

    @property
    def fired(self) -> tuple[Finding, ...]:
        """Findings that name something wrong, certain or suspected."""
        return tuple(finding for finding in self.findings if finding.status in ("fired", "suspect"))

    @property
    def advised(self) -> tuple[Finding, ...]:
        """What could go better although nothing is broken."""
        return tuple(finding for finding in self.findings if finding.status == "advice")

    @property
    def not_judged(self) -> tuple[Finding, ...]:
        """What could not be looked at, and why."""
        return tuple(finding for finding in self.findings if finding.status == "insufficient_data")

    @property
    def damaged_tapes(self) -> tuple[Mapping[str, str], ...]:
        """Segments of tapes that could not be read, or not wholly: `path` and `problem`."""
        return tuple(found for found in self.run.get("file_problems", ()) if _SEGMENT.search(found["path"]))


def diagnose(
    source: Source,
    manifest: Mapping[str, Any],
    *,
    now_ns: int | None = None,
    stacks_dir: Path | None = None,
) -> Diagnosis:
    """Run every analyzer. `now_ns` (epoch nanoseconds) only if the run is alive: else its end is read as a death."""
    policy = stall_policy(manifest)
    findings: list[Finding] = []

    @cache
    def views() -> Views:
        try:
            return look(source)
        except Exception as error:  # no room for copies: the whole run is asked, which takes longer
            findings.append(_failed("long_run", "records", error))
            return unpicked(source)

    analyzers: list[tuple[str, str, Callable[[], list[Finding]]]] = [
        ("rank_lost", "rank_lost", lambda: rank_lost.analyze(views().sampled, policy, now_ns)),
        ("hang", "hang", lambda: hang.analyze(views().sampled, policy, now_ns, stacks_dir)),
        ("nonfinite", "non_finite", lambda: nonfinite.analyze(source)),
        ("spike", "loss_spike", lambda: loss_spike.analyze(views().histories)),
        ("corruption", "replica_mismatch", lambda: corruption.analyze(views().sampled)),
        ("gradient_outlier", "gradient_corrupted", lambda: gradient_outlier.analyze(source)),
        ("exclusion", "excluded", lambda: exclusion.analyze(source)),
        ("silent_node", "node_silent", lambda: silent_node.analyze(source)),
        ("resume", "resume_differs", lambda: resume.analyze(source)),
        ("divergence", "divergence", lambda: divergence.analyze(views().histories)),
        ("loss_scale", "loss_scale_collapse", lambda: loss_scale.analyze(source)),
        ("gradient_flow", "vanishing_gradients", lambda: gradient_flow.analyze(source)),
        ("gradient_noise", "gradient_noise", lambda: gradient_noise.analyze(views().compared)),
        ("expert_load", "expert_imbalance", lambda: expert_load.analyze(source, manifest)),
        ("coverage", "records", lambda: coverage.analyze(views().sampled)),
        ("straggler", "straggler", lambda: straggler.analyze(views().compared)),
        ("stage_balance", "bubble", lambda: stage_balance.analyze(source, _schedule(manifest))),
        ("throughput", "throughput", lambda: throughput.analyze(views().compared)),
        ("communication", "exposed_communication", lambda: communication.analyze(views().sampled)),
        ("data_wait", "data_bound", lambda: data_wait.analyze(views().compared)),
        ("memory", "memory_growth", lambda: memory.analyze(views().compared)),
        ("checkpoints", "checkpoint_age", lambda: checkpoints.analyze(views().histories, manifest)),
        ("startup", "slow_startup", lambda: startup.analyze(views().sampled)),
        ("configuration", "configuration", lambda: configuration.analyze(views().histories, manifest)),
        ("health", "health", lambda: health.analyze(source)),
        ("goodput", "goodput", lambda: goodput.analyze(source)),
    ]
    for name, kind, run in analyzers:
        try:
            findings += run()
        except Exception as error:  # a damaged run must still give what the others see
            findings.append(_failed(name, kind, error))
    try:
        facts = run_facts(source, manifest, views())
        if views().looked_at:  # too many rows to compare every rank in every step
            facts["steps_compared"] = dict(views().looked_at)
    except Exception as error:
        facts = {"run_id": manifest.get("run_id"), "error": f"{type(error).__name__}: {error}"[:500]}
    try:
        account = goodput.measure(source, policy, now_ns, views())
    except Exception as error:
        account = None
        findings.append(_failed("goodput", "goodput", error))
    try:
        what_if = whatif.measure(views().compared)
    except Exception as error:
        what_if = None
        findings.append(_failed("whatif", "straggler", error))
    return conclude(findings, facts, account, what_if)


def conclude(
    findings: Sequence[Finding],
    facts: Mapping[str, Any],
    account: goodput.Account | None = None,
    what_if: whatif.WhatIf | None = None,
) -> Diagnosis:
    """The findings in order and the sentence on top; also for input that is no run of ours (`sources`)."""
    ordered = tuple(sorted(findings, key=_order))
    return Diagnosis(run=facts, verdict=_verdict(ordered, facts), findings=ordered, goodput=account, what_if=what_if)


def _schedule(manifest: Mapping[str, Any]) -> str:
    """The pipeline's schedule that the run was configured with."""
    config = manifest.get("config")
    parallel = config.get("parallel") if isinstance(config, dict) else None
    schedule = parallel.get("schedule") if isinstance(parallel, dict) else None
    return schedule if isinstance(schedule, str) else ""


def stall_policy(manifest: Mapping[str, Any]) -> StallPolicy:
    """The stall limits that the run was configured with."""
    config = manifest.get("config")
    recovery = config.get("recovery") if isinstance(config, dict) else None
    floor_s = recovery.get("hang_floor_s") if isinstance(recovery, dict) else None
    if isinstance(floor_s, (int, float)) and not isinstance(floor_s, bool) and 0 < floor_s < 86400:
        return StallPolicy(floor_s=float(floor_s))
    return StallPolicy()


def reaches(findings: Sequence[Finding], severity: Severity) -> bool:
    """Whether a fired finding is at least as severe (`--fail-on`)."""
    limit = SEVERITIES.index(severity)
    return any(finding.status == "fired" and SEVERITIES.index(finding.severity) <= limit for finding in findings)


def _order(finding: Finding) -> tuple[int, int, int, int, int]:
    return (
        _STATUS_ORDER[finding.status],
        SEVERITIES.index(finding.severity),
        _KIND_ORDER.get(finding.kind, 9),
        finding.attempt or 0,
        finding.first_step or 0,
    )


def _verdict(findings: Sequence[Finding], facts: Mapping[str, Any]) -> str:
    wrong = [finding for finding in findings if finding.status in ("fired", "suspect")]
    unjudged = sorted({finding.kind for finding in findings if finding.status == "insufficient_data"})
    checks = f"{len(unjudged)} check{'s' * (len(unjudged) > 1)}"
    missing = f" ({checks} not judged: the report lists them, and why)" if unjudged else ""
    if not wrong:
        advised = sum(finding.status == "advice" for finding in findings)
        advice = f", {advised} piece{'s' * (advised > 1)} of advice" if advised else ""
        steps = facts.get("steps")
        over = f" in {steps} steps" if steps else ""
        ranks = facts.get("num_ranks")
        of = f" of {ranks} rank{'s' * (ranks != 1)}" if ranks else ""
        return f"no finding{over}{of}{advice}{_preempted(facts)}{missing}"
    more = f" (and {len(wrong) - 1} more finding{'s' * (len(wrong) > 2)})" if len(wrong) > 1 else ""
    return wrong[0].summary + more + missing


def _preempted(facts: Mapping[str, Any]) -> str:
    """What a scheduler did is no failure, but whoever looks wants to know why the run is not at its end."""
    if facts.get("ended") != "preempted":
        return ""
    step = facts.get("preempted_at_step")
    saved = f"saved at step {step}" if step is not None else "nothing was saved then"
    return f"; preempted (SIGTERM), {saved}: go on with `rankscope train --resume`"


def _failed(name: str, kind: str, error: Exception) -> Finding:
    return Finding(
        analyzer=name,
        kind=kind,
        severity="info",
        status="insufficient_data",
        summary=f"the analyzer {name} failed on this run: {type(error).__name__}: {str(error).strip()[:300]}",
        evidence={"error_type": type(error).__name__, "error": str(error)[:2000]},
        advice="analyzer-failed",
    )
