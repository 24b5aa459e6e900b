"""Settings that cost time or safety in this run, each with the numbers that show it.

    configuration(store, Scope(manifest=run.manifest()))    # kind configuration, status advice; the cause is the rule

A rule checks a setting *and* its effect: a missing loader worker is reported only if the run waits for data, an
interval between saves only if another one would have cost measurably less. This advice never reports a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from analyzers.account.time_classes import own
from analyzers.analysis import Analysis
from analyzers.checkpoints.interval import suggest
from analyzers.checkpoints.policy import FailurePolicy
from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.run.records.not_recorded import missing, not_recorded
from analyzers.scope import Scope
from analyzers.settings.plan_deviation import plan_deviations, planned_step_s
from analyzers.settings.policy import ConfigurationPolicy
from analyzers.settings.startup import slow_startup
from analyzers.source import Source, every_kth_rank, lacking
from analyzers.wording import counted, number, percent, size_text
from probes.settings.described import CheckpointFacts, DataFacts, ParallelFacts, TrainFacts
from probes.settings.section import read

__all__ = ["ANALYSES", "RULES", "configuration"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Input of a rule."""

    source: Source
    manifest: Mapping[str, Any]
    policy: ConfigurationPolicy


Advice = tuple[str, dict[str, Any]] | None
"""Result of a rule: a sentence and its numbers; None if the rule does not apply."""


def configuration(source: Source, scope: Scope, policy: ConfigurationPolicy | None = None) -> list[Finding]:
    """One piece of advice for each rule that applies."""
    manifest = scope.manifest
    if manifest.keys() <= {"run_id"}:
        return [_insufficient("run.json is missing, damaged or of another run")]
    if not isinstance(manifest.get("config"), Mapping):
        return [_insufficient("run.json has no configuration (an attached loop can pass one to `attach`)")]
    if absent := lacking(source, steps=("duration_ns",)):
        return [_insufficient(not_recorded(absent), missing(absent))]
    run = _Run(source=source, manifest=manifest, policy=policy or ConfigurationPolicy())
    found = []
    for cause, rule in RULES.items():
        if (advice := rule(run)) is not None:
            sentence, numbers = advice
            found.append(
                Finding.advise(
                    "configuration",
                    "configuration",
                    sentence,
                    cause=cause,
                    evidence=numbers,
                    advice=f"configuration-{cause}",
                )
            )
    return found


def _buckets(run: _Run) -> Advice:
    """DDP's buckets: too many, so that the latency of calls dominates, or a single one, which overlaps with nothing."""
    size_mb, parameters = read(ParallelFacts, run.manifest).ddp_bucket_mb, run.manifest.get("num_parameters")
    sizes = run.manifest.get("mesh")
    mesh = sizes if isinstance(sizes, Mapping) else {}
    is_ddp = mesh.get("dp_replicate", 1) > 1 and all(mesh.get(dim, 1) == 1 for dim in ("dp_shard", "ep", "cp", "tp"))
    if not size_mb or not isinstance(parameters, int) or not is_ddp:
        return None
    gradients = 4 * parameters
    buckets = max(1, round(gradients / (size_mb * 2**20)))
    numbers = {"ddp_bucket_mb": size_mb, "num_buckets": buckets, "gradient_bytes": gradients}
    if buckets > run.policy.max_buckets:
        return f"`parallel.ddp_bucket_mb = {size_mb:g}` cuts the gradients into {buckets} buckets.", numbers
    if buckets == 1 and gradients >= run.policy.one_bucket_bytes:
        size = gradients / 2**20
        return (
            f"`parallel.ddp_bucket_mb = {size_mb:g}` puts all {size:,.0f} MiB of gradients into one bucket, which no "
            "backward pass can hide.",
            numbers,
        )
    return None


def _microbatches(run: _Run) -> Advice:
    """Too few microbatches for the stages of a pipeline."""
    parallel = read(ParallelFacts, run.manifest)
    stages = parallel.pp
    if not stages or stages < 2 or lacking(run.source, spans=("microbatch",)):
        return None
    if parallel.schedule == "zbv_zero_bubble":
        return None
    ((microbatches,),) = run.source.rows("SELECT max(microbatch) + 1 FROM spans")
    if microbatches >= run.policy.microbatches_per_stage * stages:
        return None
    share = (stages - 1) / (microbatches + stages - 1)
    return (
        f"{counted(microbatches, 'microbatch')} for {stages:.0f} pipeline stages leave {100 * share:.0f} % of the "
        f"pipeline's time empty: {2 * stages:.0f} to {4 * stages:.0f} are usual.",
        {"num_microbatches": microbatches, "num_stages": int(stages), "idle_ratio": round(share, 4)},
    )


def _tensor_parallel(run: _Run) -> Advice:
    """A tensor-parallel group over several hosts: it communicates in every layer."""
    if lacking(run.source, ranks=("tp", "host")):
        return None
    rows = run.source.rows(
        """
        SELECT max(hosts), count(*) FROM (
            SELECT count(DISTINCT host) AS hosts FROM (
                SELECT attempt, rank, arg_max(host, wall_ns) AS host,
                       arg_max((coalesce(pp, 0), coalesce(dp_replicate, 0), coalesce(dp_shard, 0), coalesce(cp, 0),
                                coalesce(ep, 0)), wall_ns) AS other_places
                FROM ranks WHERE rank >= 0 AND tp IS NOT NULL GROUP BY attempt, rank)
            GROUP BY attempt, other_places HAVING count(*) > 1 AND count(DISTINCT host) > 1)
        """
    )
    ((hosts, groups),) = rows
    if not groups:
        return None
    return (
        f"{groups} tensor-parallel group{'s span' if groups > 1 else ' spans'} {hosts} hosts, so every layer waits for "
        "the network.",
        {"num_groups": groups, "num_hosts": hosts},
    )


def _batch(run: _Run) -> Advice:
    """Too little work on each GPU for its kernels to fill it."""
    if lacking(run.source, ranks=("device",), steps=("tokens",)):
        return None
    ((on_gpu,),) = run.source.rows("SELECT count(*) FROM ranks WHERE starts_with(device, 'cuda')")
    ((tokens,),) = run.source.rows(
        "SELECT median(tokens) FROM steps WHERE tokens > 0 AND rank % ? = 0", [every_kth_rank(run.source, "steps")]
    )
    if not on_gpu or not tokens or tokens >= run.policy.tokens_per_rank:
        return None
    return f"A step has {tokens:,.0f} tokens per rank, so kernels are too short to fill a GPU.", {
        "tokens_per_rank": tokens
    }


def _fp16(run: _Run) -> Advice:
    """fp16 without a loss scale: small gradients become zero."""
    train = read(TrainFacts, run.manifest)
    if train.precision not in ("fp16", "float16"):
        return None
    # Rankscope's trainer always scales with fp16. An attached loop that does not scale has recorded False.
    if train.loss_scaling is not False:
        return None
    return "The run trains in fp16 without a loss scale, so gradients below 6e-8 become zero.", {"precision": "fp16"}


def _compression(run: _Run) -> Advice:
    """Compressed gradients point in another direction than uncompressed ones, or drift away from them."""
    if lacking(run.source, steps=("compression_error",)):
        return None
    # Leave out errors of 0, which are recorded before PowerSGD begins.
    errors = [
        error
        for _, error in run.source.rows(
            "SELECT step, max(compression_error) FROM steps WHERE compression_error > 0 GROUP BY step ORDER BY step"
        )
    ]
    policy, count = run.policy, len(errors)
    kind = read(ParallelFacts, run.manifest).gradient_compression
    if errors and (error := median(errors)) >= policy.compression_error:
        return (
            f"Compressed gradients ({kind}) differ from uncompressed ones by {100 * error:.0f} % (median of {count} "
            "steps).",
            {"compression_error_ratio": round(error, 4), "num_samples": count},
        )
    if count < 2 * SHARED.many_values:
        return None
    first, last = median(errors[: SHARED.many_values]), median(errors[-SHARED.many_values :])
    if last < SHARED.doubled_factor * first:
        return None
    return (
        f"Compressed gradients ({kind}) are getting less accurate: they differed from uncompressed ones by "
        f"{100 * first:.2g} %, and now by {100 * last:.2g} %.",
        {"compression_error_ratio": round(last, 4), "first_error_ratio": round(first, 4), "num_samples": count},
    )


def _interval(run: _Run) -> Advice:
    """No checkpoints, or an interval that is far from the best one for this run's save time and failures."""
    interval = read(CheckpointFacts, run.manifest).interval
    if interval is None:
        return None
    ((step_s, whole_s),) = run.source.rows(
        """
        SELECT median(step_s), sum(seconds) FROM (
            SELECT avg(duration_ns) / 1e9 AS step_s, (max(start_ns + duration_ns) - min(start_ns)) / 1e9 AS seconds
            FROM steps WHERE duration_ns IS NOT NULL AND rank % ? = 0 GROUP BY attempt)
        """,
        [every_kth_rank(run.source, "steps")],
    )
    if not interval:
        if (whole_s or 0.0) < run.policy.min_run_s:
            return None
        return f"`checkpoint.interval = 0` saves nothing: a failure costs all {whole_s:,.0f} s.", {
            "run_s": round(whole_s, 1)
        }
    best = suggest(run.source, run.manifest)
    if best is None or not step_s or not FailurePolicy().knows_rate(best.num_failures):
        return None

    def lost_ratio(every_s: float) -> float:
        return best.cost_s / every_s + every_s / (2 * best.mtbf_s)

    ((recorded,),) = run.source.rows("SELECT max(step) - min(step) + 1 FROM steps")
    length = max(int(read(TrainFacts, run.manifest).steps or 0), recorded)
    steps = min(best.steps, length)  # if the best interval is longer than the run, one save at the end is best
    now = lost_ratio(interval * step_s)
    suggested = lost_ratio(steps * step_s if steps < best.steps else best.interval_s)
    if now - suggested < SHARED.min_gain_ratio:
        return None
    return (
        f"`checkpoint.interval = {interval:.0f}` costs {percent(now)} of the time in saves and repeated steps. "
        + (
            f"One save at the end of the {length} steps would cost {percent(suggested)}."
            if steps < best.steps
            else f"The best interval, {steps} steps, would cost {percent(suggested)}."
        ),
        {
            "interval_steps": int(interval),
            "suggested_steps": steps,
            "lost_ratio": round(now, 4),
            "lost_at_suggested_ratio": round(suggested, 4),
            "save_ms": round(1e3 * best.cost_s, 3),
            "mtbf_s": round(best.mtbf_s, 1),
        },
    )


def _workers(run: _Run) -> Advice:
    """Batches are made in the training process, which waits for them."""
    if read(DataFacts, run.manifest).num_workers != 0:
        return None
    share = _share(run, own("data"))
    if share < SHARED.cost_ratio:
        return None
    return (
        f"`data.num_workers = 0` makes batches in the training process, which takes {100 * share:.0f} % of a step.",
        {"data_ratio": round(share, 4)},
    )


def _evaluation(run: _Run) -> Advice:
    """Evaluation takes a large part of the run."""
    interval = read(TrainFacts, run.manifest).eval_interval
    share = _share(run, own("evaluate"))
    if not interval or share < SHARED.cost_ratio:
        return None
    return (
        f"`train.eval_interval = {interval:.0f}` spends {100 * share:.0f} % of the time on evaluation.",
        {"evaluate_ratio": round(share, 4), "eval_interval": int(interval)},
    )


def _share(run: _Run, expression: str) -> float:
    """Share of the steps' time, without the first steps."""
    ((share,),) = run.source.rows(
        f"""
        SELECT CAST(sum({expression}) AS DOUBLE) / sum(duration_ns) FROM steps
        WHERE rank >= 0 AND duration_ns IS NOT NULL AND step > ? AND rank % ? = 0
        """,
        [SHARED.warm_up_steps, every_kth_rank(run.source, "steps")],
    )
    return float(share or 0.0)


def _plan(run: _Run) -> Advice:
    """Memory, traffic or step time that differs from the trainer's plan."""
    plan = run.manifest.get("planned")
    if not isinstance(plan, Mapping):
        return None
    ((step_s, count),) = run.source.rows(
        """
        SELECT median(duration_ns) / 1e9, count(DISTINCT step) FROM steps
        WHERE rank >= 0 AND duration_ns IS NOT NULL AND step > ? AND attempt = (SELECT max(attempt) FROM steps)
        """,
        [SHARED.warm_up_steps],
    )
    if count < SHARED.min_steps:
        return None
    off = [
        (each.what, each.ratio, size_text(each.measured_bytes), size_text(each.planned_bytes))
        for each in plan_deviations(run.source, run.manifest)
        if not each.as_planned
    ]
    planned_s = planned_step_s(run.source, run.manifest)
    if planned_s is not None and 0 < planned_s * SHARED.slow_factor <= step_s:
        off.append(("time of a step", step_s / planned_s, f"{number(step_s)} s", f"{number(planned_s)} s"))
    if not off:
        return None
    listed = ", ".join(
        f"{what} {measured} instead of {planned} ({100 * (ratio - 1):+.0f} %)"
        for what, ratio, measured, planned in off[:4]
    )
    numbers = {f"{what.replace(' ', '_')}_of_planned_ratio": round(ratio, 4) for what, ratio, *_ in off}
    return f"The run differs from its plan: {listed}.", numbers


def _utilisation(run: _Run) -> Advice:
    """GPUs that run no kernel for a large part of the time."""
    if lacking(run.source, health=("gpu_utilization_ratio",)):
        return None
    ((share, samples),) = run.source.rows(
        "SELECT median(gpu_utilization_ratio), count(*) FROM health "
        "WHERE device <> 'host' AND gpu_utilization_ratio IS NOT NULL"
    )
    if samples < run.policy.min_samples or share >= run.policy.utilisation_ratio:
        return None
    return (
        f"GPU utilization is {100 * share:.0f} % in the median of {samples:,} samples, below "
        f"{100 * run.policy.utilisation_ratio:.0f} %.",
        {"gpu_utilization_ratio": round(share, 4), "num_samples": samples},
    )


RULES: dict[str, Callable[[_Run], Advice]] = {
    "buckets": _buckets,
    "microbatches": _microbatches,
    "tensor_parallel": _tensor_parallel,
    "batch": _batch,
    "fp16": _fp16,
    "compression": _compression,
    "checkpoint_interval": _interval,
    "workers": _workers,
    "evaluation": _evaluation,
    "plan": _plan,
    "utilisation": _utilisation,
}
"""Rules by cause; the cause is a part of the anchor in the runbook."""


_insufficient = partial(Finding.not_judged, "configuration", "configuration", "The configuration was not checked")


ANALYSES = (
    Analysis(kinds=("slow_startup",), run=slow_startup, records="sampled"),
    Analysis(kinds=("configuration",), run=configuration, records="histories", advises=True),
)
