"""Evidence and next step of the numerics findings, one sentence each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from analyzers.finding import Finding, evidence_of
from analyzers.numerics.nonfinite_origin import NORM, WEIGHTS
from analyzers.wording import counted, group_text, is_number, listed, number, percent, ranks_text

__all__ = ["NEXT", "WHY"]

Explain = Callable[[Finding], str]


def _non_finite(finding: Finding) -> str:
    facts = evidence_of(finding)
    origin = ""
    if facts.get("origin_module"):
        operation = f" ({facts['origin_operation']})" if facts.get("origin_operation") else ""
        origin = f"the replay found the first bad output in {facts['origin_module']}{operation}"
    if facts.get("num_flagged_inputs"):
        group = group_text(str(facts.get("process_group")))
        first = f", first in {facts['op']} #{facts['seq']} of {group}" if "op" in facts else ""
        counts = f"{facts['num_flagged_inputs']} of {facts.get('num_checked_inputs', '?')}"
        inputs = f"{counts} checked inputs of collectives"
        if finding.cause == "reduction":
            return f"Only {inputs} held NaN or Inf, all of them in calls after that reduction."
        return f"Before the reduction {inputs} held NaN or Inf{first}{f', and {origin}' if origin else ''}."
    if origin:
        return f"{origin[0].upper()}{origin[1:]}."
    if facts.get("named_by") == WEIGHTS:
        return "The step's first loss was finite. In a later pass weights were NaN or Inf, and so was its loss."
    if facts.get("named_by") == NORM:
        return "Every rank counted its gradients' NaN and Inf elements: there were none."
    if facts.get("ranks_with_nonfinite_local_loss"):
        is_shared = facts.get("named_by") == "tensor_parallel_group"
        shared = ", which sum over their tensor-parallel group" if is_shared else ""
        return f"The local loss was NaN or Inf on {ranks_text(facts['ranks_with_nonfinite_local_loss'])}{shared}."
    if bad := facts.get("ranks_with_nonfinite_gradient"):
        return f"The gradient of {ranks_text(bad)} held NaN or Inf before the reduction."
    if checked := facts.get("ranks_with_checked_gradient"):
        return f"The gradients of {ranks_text(checked)} were finite before the reduction."
    if facts.get("num_checked_inputs"):
        return f"All {facts['num_checked_inputs']} checked inputs of collectives were finite before their reduction."
    return "Inputs of collectives were not checked, so only a rank's own loss or gradients can identify it."


def _loss_spike(finding: Finding) -> str:
    facts = finding.evidence
    norm = f", gradient norm {number(facts['grad_norm'])}" if is_number(facts.get("grad_norm")) else ""
    before = f"{number(facts.get('loss_z'))} sigma above its recent level of {number(facts.get('loss_before'), 4)}"
    return f"The loss is {number(facts.get('loss'), 4)}, {before}{norm}."


def _divergence(finding: Finding) -> str:
    facts = finding.evidence
    medians = f"from {number(facts.get('loss_lowest'), 4)} to {number(facts.get('loss_highest'), 4)}"
    if facts.get("rise_z") is None:
        return f"The printed loss rose {medians}, and had not come back at the end of the log."
    unit = "lines" if facts.get("printed") else "steps"
    return f"The median loss of 20 {unit} rose {medians}, {number(facts.get('rise_z'))} times its noise."


def _overfitting(finding: Finding) -> str:
    facts = finding.evidence
    since = counted(facts.get("evaluations_since_lowest"), "evaluation")
    return f"In {since} since then no loss was as low, and the newest losses exceed the lowest by more than the noise."


def _logged_value(finding: Finding) -> str:
    facts = finding.evidence
    steps = counted(facts.get("num_steps"), "step")
    return f"The two differ by the same factor of {number(facts.get('ratio'), 4)} in {steps}."


def _loss_scale(finding: Finding) -> str:
    return f"{finding.evidence.get('num_overflows', '?')} steps overflowed and were dropped, and each halved the scale."


def _gradient_flow(finding: Finding) -> str:
    facts = evidence_of(finding)
    if finding.cause == "whole":
        rise = number(facts.get("rise_factor_ratio"))
        return f"The norm is {rise} times its maximum in the first quarter of the run, also in the median block."
    blocks = f"{facts.get('num_blocks', '?')} of {facts.get('num_blocks_of_model', '?')} blocks"
    which = f"{blocks} ({listed(facts.get('blocks') or [], 6)})"
    if finding.cause == "zero":
        median = number(facts.get("norm_of_median_block"))
        return f"All gradients of {which} are zero, and the median block has {median}."
    norm, others = number(facts.get("norm")), number(facts.get("norm_of_others"))
    return f"The norm is {norm} against {others} elsewhere, in {which}."


def _gradient_noise(finding: Finding) -> str:
    facts = finding.evidence
    # If no gradient signal could be measured, the noise scale has no upper bound (`high_tokens` is missing).
    low, high = number(facts.get("low_tokens"), 2), facts.get("high_tokens")
    scale = f"{low} to {number(high, 2)}" if is_number(high) else f"at least {low}"
    return (
        f"Over {facts.get('samples', '?')} samples the noise scale is {scale} tokens, "
        f"against {number(facts.get('batch_tokens'), 2)} in a batch."
    )


def _expert_imbalance(finding: Finding) -> str:
    facts = finding.evidence
    over, limit = f"over {facts.get('num_samples', '?')} samples", facts.get("limit_ratio")
    if finding.cause == "dropped":
        worst = f"{percent(facts.get('worst_ratio'))} in block {facts.get('worst_layer', '?')}"
        dropped = f"{percent(facts.get('dropped_ratio'))} of all token-to-expert assignments were dropped {over}"
        return f"{dropped}, {worst} (limit {percent(limit)})."
    load = number(facts.get("load_ratio"))
    return f"The load of the expert was {load} times an even share {over} (limit {number(limit)})."


def _after_non_finite(finding: Finding) -> str:
    ranks, batch = ranks_text(finding.ranks), finding.evidence.get("batch_index")
    fine = "" if batch is None else f" Batch {batch} was probably fine."
    if finding.cause == "reduction" and not finding.evidence.get("replay_verdict"):
        return "Reduce gradients in fp32, or lower the loss scale in fp16: each rank's gradient was finite."
    if finding.evidence.get("named_by") == NORM:
        return "Lower the loss scale or the learning rate: the squares of the gradients exceed the largest float32."
    return {
        "transient": f"If {ranks} {'does' if len(finding.ranks) == 1 else 'do'} this again, test the device.{fine}",
        "batch": "Inspect the samples named, or those with the highest loss.",
        "weights": "Inspect the layer named, whose weights or activations had grown. Lower the rate or clip harder.",
        "data_or_numerics": "Inspect the layer and the samples named.",
    }.get(
        str(finding.evidence.get("replay_verdict")),
        f"Check the batch and the operations of that step on {ranks} (log, division, overflow). If the same device "
        "does it again with other data, test the device.",
    )


def _after_spike(finding: Finding) -> str:
    return {
        "transient": "Test the devices and search for nondeterminism: the same step gave two results.",
        "weights": "Lower the learning rate or clip harder: the update before it was too large.",
        "learning_rate": "Check the learning rate's schedule at that step: the samples are probably fine.",
    }.get(
        finding.cause,
        "Compare the samples and the learning rate of that step with those before it: the log shows nothing else."
        if finding.evidence.get("printed")
        else f"Run `rankscope analyze RUN --why-spike {finding.first_step}` for its ranks, samples and layers.",
    )


def _after(general: str, **by_cause: str) -> Explain:
    return lambda finding: by_cause.get(finding.cause, general)


def _next_logged_value(finding: Finding) -> str:
    return {
        "grad_norm": "Sum the squares of the shards' norms over all ranks, counting each shard once.",
        "loss": "To log the mean, divide only once by the number of ranks or micro-batches.",
        "tokens": "Log the tokens of this rank's step, over all its micro-batches: rates are summed over ranks.",
    }[finding.cause]


WHY: Mapping[str, Explain] = {
    "non_finite": _non_finite,
    "loss_spike": _loss_spike,
    "divergence": _divergence,
    "overfitting": _overfitting,
    "loss_scale_collapse": _loss_scale,
    "logged_value": _logged_value,
    "expert_imbalance": _expert_imbalance,
    "exploding_gradients": _gradient_flow,
    "vanishing_gradients": _gradient_flow,
    "gradient_noise": _gradient_noise,
}
NEXT: Mapping[str, Explain] = {
    "non_finite": _after_non_finite,
    "loss_spike": _after_spike,
    "divergence": _after("Roll back to a checkpoint from before the climb, and lower the learning rate."),
    "overfitting": _after("Keep the checkpoint of the lowest validation loss, and stop or regularise."),
    "logged_value": _next_logged_value,
    "loss_scale_collapse": _after("Train in bf16, or find the layer whose activations overflow."),
    "expert_imbalance": _after(
        "Check the load of the experts.",
        hot="Raise model.balance_loss, or set a capacity (model.capacity_factor).",
        dead="Raise model.balance_loss, or use fewer experts.",
        dropped="Raise model.capacity_factor or model.balance_loss.",
    ),
    "exploding_gradients": _after(
        "Lower the learning rate or clip harder, and inspect the blocks named.",
        trend="Check initialisation and normalisation from the output on: each block enlarges the gradient.",
        whole="Check what changed at that step (learning rate, data, loss scale). Lower the rate or clip harder.",
    ),
    "vanishing_gradients": _after(
        "Check initialisation, normalisation and residual branches of the blocks named.",
        trend="Check initialisation, normalisation and residual branches: each block loses a part of the gradient.",
        zero="Search for a detach, a branch multiplied by zero, or fp16 without a loss scale before the blocks named.",
    ),
    "gradient_noise": _after("Try another batch size with the learning rate scaled to it, and compare loss by tokens."),
}
