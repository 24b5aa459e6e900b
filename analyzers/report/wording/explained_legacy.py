"""Explanations of kinds whose package has no `explain` yet; deleted entry by entry as they move there."""

from __future__ import annotations

from analyzers.finding import Finding
from analyzers.report.wording.reasons import proved
from analyzers.report.wording.remedies import remedy
from analyzers.wording import is_number

__all__ = ["next_step", "why"]


def why(finding: Finding) -> str:
    """What proves a finding, in one line."""
    numbers = finding.evidence
    match finding.kind:
        case "straggler" if finding.cause != "communication":
            factors = numbers.get("phase_factors_ratio") or {}
            excess = numbers.get("phase_excess_ms") or {}
            phases = ", ".join(
                f"{name} {value:.2f}x" if is_number(value) and value < 10 else f"{name} +{excess.get(name, 0):.3g} ms"
                for name, value in factors.items()
            )
            caused = numbers.get("caused_wait_ratio")
            share = "" if caused is None else f"; it causes {100 * caused:.0f} % of the waiting in collectives"
            return f"{finding.cause}: {phases}{share}"
        case "straggler":
            if "transfer_before_ms" in numbers:
                return f"transfers of {numbers.get('transfer_ms')} ms against {numbers['transfer_before_ms']} ms before"
            return (
                f"transfers of {numbers.get('transfer_ms')} ms against {numbers.get('transfer_of_others_ms')} ms "
                f"in the groups beside it"
            )
        case "stage_imbalance":
            work = ", ".join(f"{value:.3g}" for value in numbers.get("work_ms_by_coordinate") or [])
            return f"milliseconds of work a step by pipeline coordinate: {work}"
        case "throughput":
            rises = ", ".join(
                f"{name.removesuffix('_rise_ms')} {value:+.3g} ms"
                for name, value in numbers.items()
                if name.endswith("_rise_ms") and is_number(value)
            )
            return f"of a step: {rises}" if rises else finding.summary
    return proved(finding) or finding.summary


def next_step(finding: Finding) -> str:
    """What to do, and where more of it stands."""
    rank = f"rank {finding.ranks[0]}" if len(finding.ranks) == 1 else "the ranks named"
    advice = {
        "straggler": {
            "compute": f"check clocks, thermals and neighbours of {rank}'s device and host",
            "gpu_clock": f"look at cooling, power and locked clocks of {rank}'s GPU (nvidia-smi -q -d CLOCK)",
            "data": f"check the data loader and the disk of {rank}'s host",
            "host": f"look for what else runs on {rank}'s host (top, numactl, cgroup limits), and for swapping",
            "sequence_length": "even out the tokens that each rank gets (pack or sort sequences by length)",
            "communication": f"check the network card and cable of {rank}",
        }.get(finding.cause, f"look at {rank}"),
        "stage_imbalance": "give that stage fewer layers (parallel.stage_costs)",
        "throughput": "look for what changed for all ranks at that step: clocks, a shared disk, the network, the data",
    }.get(finding.kind, remedy(finding))
    return advice
