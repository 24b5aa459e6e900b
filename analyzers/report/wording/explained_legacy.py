"""Explanations of kinds whose package has no `explain` yet; deleted entry by entry as they move there."""

from __future__ import annotations

from analyzers.finding import Finding
from analyzers.report.wording.reasons import proved
from analyzers.report.wording.remedies import remedy
from analyzers.wording import counted, is_number, listed

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
        case "hang":
            waiting = numbers.get("waiting_ranks") or []
            call = f" in {numbers['op']} {numbers['seq']} of {numbers['process_group']}" if "op" in numbers else ""
            caller = f" at {numbers['caller']}" if numbers.get("caller") else ""
            who = "silent"
            if waiting:
                who = f"{counted(len(waiting), 'rank')} {'waits' if len(waiting) == 1 else 'wait'}"
            return f"{who}{call}{caller} for {numbers.get('silent_s')} s (limit {numbers.get('limit_s')} s)"
        case "rank_lost":
            message = str(numbers.get("message") or "").strip().splitlines()
            victims = numbers.get("victims") or []
            what = message[0] if message else str(numbers.get("signal") or numbers.get("exit_code") or "no word of it")
            at = f" ({numbers['raised_at']})" if numbers.get("raised_at") else ""
            who = counted(len(victims), "other rank" if finding.ranks else "rank")
            return what + at + (f"; {who} ended because of it" if victims else "")
        case "stage_imbalance":
            work = ", ".join(f"{value:.3g}" for value in numbers.get("work_ms_by_coordinate") or [])
            return f"milliseconds of work a step by pipeline coordinate: {work}"
        case "resume_differs":
            return f"{listed(numbers.get('differing_parts') or [])}: not what the checkpoint's manifest says was saved"
        case "throughput":
            rises = ", ".join(
                f"{name.removesuffix('_rise_ms')} {value:+.3g} ms"
                for name, value in numbers.items()
                if name.endswith("_rise_ms") and is_number(value)
            )
            return f"of a step: {rises}" if rises else finding.summary
    return proved(finding) or finding.summary


def _after_a_hang(finding: Finding, rank: str) -> str:
    caller = f" at {finding.evidence['caller']}" if finding.evidence.get("caller") else ""
    return {
        "stopped": f"continue or restart the process of {rank}",
        "data": f"look at the data loader of {rank}: its stack is in the evidence",
        "gil": f"look at the native code that the innermost line of {rank}'s stack calls: it must release the GIL",
        "checkpoint": f"look at the disk that {rank} writes its checkpoint to",
        "mismatch_size": f"compare the shapes that both sides bring{caller}: an uneven batch, a branch on the rank",
        "mismatch_dtype": f"compare the element types that both sides bring{caller}: autocast, a part not converted",
        "order_inversion": "make all ranks take the groups in one order, or wait for the first call before the second",
        "all_entered": "look at the links and the backend (NCCL_DEBUG=INFO, firewall, interface): no rank is missing",
    }.get(finding.cause, f"look at the stack of {rank} and at the code around the call{caller}")


def _after_a_death(finding: Finding, rank: str) -> str:
    raised = finding.evidence.get("raised_at")
    if finding.cause == "exception":
        return f"look at {raised}" if raised else f"read the traceback in the log of {rank}"
    return {
        "out_of_memory": f"look at the memory of {rank} from step to step, and beside that of its peers",
        "exit": f"read the end of the log of {rank}: it left by itself",
        "killed_all": "look at the scheduler's record of the job, and at who or what stopped it",
        "connection_lost": "look at the network between the hosts at that time, and at the end of every rank's log",
        "store_lost": "look at the host of the rendezvous store, and at the launcher or process that held it",
    }.get(finding.cause, f"look at the log of {rank} and at its host (out of memory, XID)")


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
        "hang": _after_a_hang(finding, rank),
        "rank_lost": _after_a_death(finding, rank),
        "stage_imbalance": "give that stage fewer layers (parallel.stage_costs)",
        "resume_differs": "if it is not meant (other data, another seed), do not trust the run from there on",
        "throughput": "look for what changed for all ranks at that step: clocks, a shared disk, the network, the data",
    }.get(finding.kind, remedy(finding))
    return advice
