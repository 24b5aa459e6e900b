"""Explanations of kinds whose package has no `explain` yet; deleted entry by entry as they move there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
        case "non_finite":
            checked, flagged = numbers.get("num_checked_inputs"), numbers.get("num_flagged_inputs")
            where = (
                f", first in {numbers['op']} {numbers['seq']} of {numbers['process_group']}" if "op" in numbers else ""
            )
            inputs = f"{flagged} of {checked} inputs of collectives held NaN or Inf before the reduction{where}"
            return inputs + _origin(numbers)
        case "replica_mismatch" | "fingerprint_chain_broken":
            num_tensors = numbers.get("num_tensors")
            broken = numbers.get("chain_broken_ranks") or []
            proof = []
            if numbers.get("replica_groups"):
                proof.append(f"bits differ over {numbers.get('num_replicas')} replicas")
            if broken:
                proof.append(f"bits changed on rank {listed(broken)} while no optimizer ran")
            return f"{' and '.join(proof)}, in {counted(num_tensors, 'tensor')}; last found healthy at step " + str(
                numbers.get("last_healthy_step", "?")
            )
        case "divergence":
            rise = f"from {numbers.get('loss_lowest')} to {numbers.get('loss_highest')}"
            return f"medians of the loss rise {rise}, {numbers.get('rise_z')} times what its noise can do"
        case "loss_scale_collapse":
            overflows = counted(numbers.get("num_overflows"), "overflow")
            return f"{overflows}, each of which dropped a step and halved the scale"
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
        case "loss_spike":
            return (
                f"loss {numbers.get('loss')} against {numbers.get('loss_before')} before "
                f"({numbers.get('loss_z')} sigma), gradient norm {numbers.get('grad_norm')}"
            )
    return proved(finding) or finding.summary


def _origin(numbers: Mapping[str, Any]) -> str:
    """What the replay saw."""
    if not numbers.get("origin_module"):
        return ""
    operation = f" in {numbers['origin_operation']}" if numbers.get("origin_operation") else ""
    return f"; replayed, the first bad output is that of {numbers['origin_module']}{operation}"


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
        "non_finite": {
            "transient": f"test the device of {rank} if it happens there again; a good batch was skipped for it",
            "batch": "look at the samples named, or at those with the highest loss",
            "weights": "look at the layer named: its weights or activations had grown; lower the rate or clip harder",
            "data_or_numerics": "look at the layer and the samples named",
        }.get(
            str(finding.evidence.get("judgement")),
            "if it comes back on another rank it is data or numerics, if it stays with the device replace it",
        ),
        "replica_mismatch": f"test the device of {rank}; twice on the same device: take it out",
        "fingerprint_chain_broken": f"test the memory of {rank}'s device; twice on the same device: take it out",
        "divergence": "go back to a checkpoint from before it turned and lower the rate",
        "stage_imbalance": "give that stage fewer layers (parallel.stage_costs)",
        "expert_imbalance": {
            "hot": "raise model.balance_loss, or give a capacity (model.capacity_factor)",
            "dead": "raise model.balance_loss, or take fewer experts",
            "dropped": "raise model.capacity_factor or model.balance_loss",
        }.get(finding.cause, "look at the load of the experts"),
        "loss_scale_collapse": "train in bf16, or find the layer whose activations overflow",
        "resume_differs": "if it is not meant (other data, another seed), do not trust the run from there on",
        "throughput": "look for what changed for all ranks at that step: clocks, a shared disk, the network, the data",
        "loss_spike": {
            "transient": "nothing computed twice may differ: test the devices, and look for nondeterminism",
            "weights": "the update before it was too large: lower the rate or clip harder",
        }.get(
            finding.cause,
            f"`rankscope analyze RUN --why-spike {finding.first_step}` shows ranks, samples and layers; "
            "lower the rate if it comes back without that batch",
        ),
    }.get(finding.kind, remedy(finding))
    return advice
