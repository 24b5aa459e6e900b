"""A diagnosis for the terminal: Verdict / Why / Next in three lines, then each finding with its numbers, then the run.

    render(diagnosis, rich.console.Console())

Plain text where the output is no terminal. Text that comes from the run is shown as it is, never obeyed: neither rich's
markup nor a terminal's control sequences in it have an effect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..diagnose import Diagnosis
from ..finding import Finding
from ..goodput import Account
from ..whatif import WhatIf
from .account_lines import goodput_line, what_if_line
from .links import finding_link
from .remedies import REMEDIES
from .trace_table import render_ranks

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

__all__ = ["evidence_rows", "next_step", "render", "title", "visible", "why"]

_COLOURS = {"critical": "bold red", "warning": "yellow", "info": "cyan"}
_TITLES = {
    "hang": "HANG",
    "loss_spike": "LOSS SPIKE",
    "non_finite": "NON-FINITE",
    "rank_lost": "RANK LOST",
    "resume_differs": "RESUME DIFFERS",
    "replica_mismatch": "REPLICA MISMATCH",
    "fingerprint_chain_broken": "STATE CHANGED",
    "straggler": "STRAGGLER",
}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
_NOT_SHOWN = {
    "phase_factors_ratio",
    "phase_excess_ms",
    "stacks",
    "message",
    "differs",
    "doing",
    "last_seq_of_culprits",
    "named_by",
    "episodes",
    "whatif_basis",
}
_UNITS = {"_ms": " ms", "_s": " s", "_bytes": " bytes", "_z": " sigma"}
MAX_VALUE = 120


def render(diagnosis: Diagnosis, console: Console) -> None:
    """Print the report."""
    _head(diagnosis, console)
    for number, finding in enumerate(diagnosis.fired):
        console.print()
        _finding(finding, console, shown_above=number == 0)
        if link := finding_link(diagnosis.run, finding):
            console.print(_indented(f"page: {link}", "dim"), soft_wrap=True)
    if diagnosis.advised:
        console.print()
        for finding in diagnosis.advised:
            console.print(_text(visible(f"advice      {finding.summary}; {next_step(finding)}"), "cyan"))
    if diagnosis.not_judged:
        console.print()
        for finding in diagnosis.not_judged:
            console.print(_text(visible(f"not judged  {finding.summary}"), "dim"))
    console.print()
    _facts(diagnosis.run, console, diagnosis.goodput, diagnosis.what_if)
    if "trace" in diagnosis.run:  # of profiler traces
        render_ranks(diagnosis.run["trace"]["ranks"], console)


def why(finding: Finding) -> str:
    """What proves a finding, in one line."""
    numbers = finding.evidence
    match finding.kind:
        case "straggler" if finding.cause != "communication":
            factors = numbers.get("phase_factors_ratio") or {}
            excess = numbers.get("phase_excess_ms") or {}
            phases = ", ".join(
                f"{name} {value:.2f}x" if _is_number(value) and value < 10 else f"{name} +{excess.get(name, 0):.3g} ms"
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
                who = f"{_count(len(waiting), 'rank')} {'waits' if len(waiting) == 1 else 'wait'}"
            return f"{who}{call}{caller} for {numbers.get('silent_s')} s (limit {numbers.get('limit_s')} s)"
        case "rank_lost":
            message = str(numbers.get("message") or "").strip().splitlines()
            victims = numbers.get("victims") or []
            what = message[0] if message else str(numbers.get("signal") or numbers.get("exit_code") or "no word of it")
            others = f"; {_count(len(victims), 'other rank')} ended because of it" if victims else ""
            return what + others
        case "non_finite":
            checked, flagged = numbers.get("num_checked_inputs"), numbers.get("num_flagged_inputs")
            where = (
                f", first in {numbers['op']} {numbers['seq']} of {numbers['process_group']}" if "op" in numbers else ""
            )
            return f"{flagged} of {checked} inputs of collectives held NaN or Inf before the reduction{where}"
        case "replica_mismatch" | "fingerprint_chain_broken":
            count = numbers.get("num_tensors")
            broken = numbers.get("chain_broken_ranks") or []
            proof = []
            if numbers.get("replica_groups"):
                proof.append(f"bits differ over {numbers.get('num_replicas')} replicas")
            if broken:
                proof.append(f"bits changed on rank {_listed(broken)} while no optimizer ran")
            return f"{' and '.join(proof)}, in {_count(count, 'tensor')}; last found healthy at step " + str(
                numbers.get("last_healthy_step", "?")
            )
        case "divergence":
            rise = f"from {numbers.get('loss_lowest')} to {numbers.get('loss_highest')}"
            return f"medians of the loss rise {rise}, {numbers.get('rise_z')} times what its noise can do"
        case "loss_scale_collapse":
            return (
                f"{_count(numbers.get('num_overflows'), 'overflow')}, each of which dropped a step and halved the scale"
            )
        case "stage_imbalance":
            work = ", ".join(f"{value:.3g}" for value in numbers.get("work_ms_by_coordinate") or [])
            return f"milliseconds of work a step by pipeline coordinate: {work}"
        case "resume_differs":
            return f"{_listed(numbers.get('differing_parts') or [])}: not what the checkpoint's manifest says was saved"
        case "throughput":
            rises = ", ".join(
                f"{name.removesuffix('_rise_ms')} {value:+.3g} ms"
                for name, value in numbers.items()
                if name.endswith("_rise_ms") and _is_number(value)
            )
            return f"of a step: {rises}" if rises else finding.summary
        case "loss_spike":
            return (
                f"loss {numbers.get('loss')} against {numbers.get('loss_before')} before "
                f"({numbers.get('loss_z')} sigma), gradient norm {numbers.get('grad_norm')}"
            )
    return finding.summary


def next_step(finding: Finding) -> str:
    """What to do, and where more of it stands."""
    rank = f"rank {finding.ranks[0]}" if len(finding.ranks) == 1 else "the ranks named"
    advice = {
        "straggler": {
            "compute": f"check clocks, thermals and neighbours of {rank}'s device and host",
            "data": f"check the data loader and the disk of {rank}'s host",
            "host": f"look for what else runs on {rank}'s host (top, numactl, cgroup limits), and for swapping",
            "gpu_clock": f"look at cooling, power and locked clocks of {rank}'s GPU (nvidia-smi -q -d CLOCK)",
            "sequence_length": "even out the tokens that each rank gets (pack or sort sequences by length)",
            "communication": f"check the network card and cable of {rank}",
        }.get(finding.cause, f"look at {rank}"),
        "hang": {
            "stopped": f"continue or restart the process of {rank}",
            "data": f"look at the data loader of {rank}: its stack is in the evidence",
        }.get(finding.cause, f"look at the stack of {rank} and at the code around the call"),
        "rank_lost": f"look at the log of {rank} and at its host (out of memory, XID)",
        "non_finite": "if it comes back on another rank it is data or numerics, if it stays with the device replace it",
        "replica_mismatch": f"test the device of {rank}; twice on the same device: take it out",
        "fingerprint_chain_broken": f"test the memory of {rank}'s device; twice on the same device: take it out",
        "divergence": "go back to a checkpoint from before it turned and lower the rate",
        "stage_imbalance": "give that stage fewer layers (parallel.stage_costs)",
        "vanishing_gradients": "look at the initialisation, the norms and the residual branches of the blocks named",
        "exploding_gradients": "lower the rate or clip harder; look at the blocks named",
        "loss_scale_collapse": "train in bf16, or find the layer whose activations overflow",
        "resume_differs": "if it is not meant (other data, another seed), do not trust the run from there on",
        "throughput": "look for what changed for all ranks at that step: clocks, a shared disk, the network, the data",
        "loss_spike": "look at the batches named; lower the rate if it comes back without them",
    }.get(finding.kind, REMEDIES.get(finding.kind, "see the runbook"))
    gain = finding.evidence.get("speedup_without_it_ratio")
    without = f"; without it: {gain:.2f}x faster" if _is_number(gain) else ""
    return f"{advice} (docs/runbook.md#{finding.advice}){without}"


def title(finding: Finding) -> str:
    """The kind in capitals."""
    return _TITLES.get(finding.kind, finding.kind.upper().replace("_", " "))


def visible(text: str) -> str:
    """Text from a run without anything that a terminal would obey; line ends become spaces."""
    return _CONTROL.sub("\ufffd", text.replace("\r", " ").replace("\n", " ").replace("\t", " "))


def _head(diagnosis: Diagnosis, console: Console) -> None:
    worst = diagnosis.fired[0] if diagnosis.fired else None
    lines = [("Verdict", diagnosis.verdict, _COLOURS[worst.severity] if worst else "bold green")]
    if worst:
        lines += [("Why", why(worst), ""), ("Next", next_step(worst), "")]
    table = _columns()
    for label, text, style in lines:
        table.add_row(_text(label, "bold"), _text(visible(text), style))
    console.print(table)


def _finding(finding: Finding, console: Console, *, shown_above: bool) -> None:
    where = f"step {finding.first_step}" if finding.first_step is not None else "run"
    if finding.last_step is not None and finding.last_step != finding.first_step:
        where = f"steps {finding.first_step} to {finding.last_step}"
    ranks = f"  rank{'s' * (len(finding.ranks) > 1)} {_listed(finding.ranks)}" if finding.ranks else ""
    attempt = f"  attempt {finding.attempt}" if finding.attempt else ""
    suspect = "  suspected" if finding.status == "suspect" else ""
    head = _text(title(finding), _COLOURS[finding.severity])
    head.append(visible(f"  {finding.severity}{suspect}  {where}{ranks}{attempt}"), style="dim")
    console.print(head)
    if not shown_above:
        console.print(_indented(finding.summary, ""))
    rows = evidence_rows(finding.evidence)
    if finding.cost_s:
        rows.append(("cost", f"{finding.cost_s:.3g} s"))
    console.print(_pairs(rows, console.width))
    for rank, frames in (finding.evidence.get("stacks") or {}).items():
        console.print(_indented(f"stack of rank {rank}, innermost first", "dim"))
        for frame in frames:
            console.print(_indented(f"  {frame}", ""))
    for what, ranks_of in (finding.evidence.get("differs") or {}).items():
        console.print(_indented(f"{what}: rank{'s' * (len(ranks_of) > 1)} {_listed(ranks_of)}", ""))
    if not shown_above:
        console.print(_indented(f"next: {next_step(finding)}", "dim"))


def evidence_rows(evidence: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, value in evidence.items():
        if name in _NOT_SHOWN or value is None or value == [] or value == "":
            continue
        label, unit = name, ""
        for suffix, shown in _UNITS.items():
            if name.endswith(suffix) and _is_number(value):
                label, unit = name.removesuffix(suffix) + (" deviation" if suffix == "_z" else ""), shown
        if name.endswith("_ratio") and _is_number(value):
            label = name.removesuffix("_ratio")
            text = f"{value:.2f}x" if "factor" in name or "speedup" in name else _percent(value)
        elif isinstance(value, bool):
            text = "yes" if value else "no"
        elif isinstance(value, (list, tuple)):
            text = _listed(value)
        else:
            text = f"{value:.5g}{unit}" if isinstance(value, float) else f"{value}{unit}"
        rows.append((label.replace("_", " "), text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 3] + "..."))
    return rows


def _saves(interval: Mapping[str, Any]) -> str:
    """What a save costs, and how often to save by that."""
    hours, failures = interval["mtbf_s"] / 3600, interval["num_failures"]
    rate = f"{_count(failures, 'failure')} in this run" if failures else "an assumed failure rate"
    between = f"{hours:,.0f} h" if hours >= 10 else f"{60 * hours:,.1f} min"
    return (
        f"{interval['num_saves']} measured, {1e3 * interval['cost_s']:.1f} ms of standstill each; with {rate} "
        f"(one in {between}) save every {_count(interval['steps'], 'step')} ({interval['interval_s']:,.0f} s, Daly)"
    )


def _facts(
    facts: Mapping[str, Any], console: Console, account: Account | None = None, what_if: WhatIf | None = None
) -> None:
    mesh = " x ".join(f"{name} {size}" for name, size in (facts.get("mesh") or {}).items())
    devices = ", ".join(facts.get("devices") or [])
    parts = [
        _count(facts.get("num_ranks"), "rank"),
        mesh,
        devices,
        _count(facts.get("steps"), "step"),
        _count(facts.get("attempts"), "attempt"),
        f"{facts['wall_s']:.1f} s" if _is_number(facts.get("wall_s")) else "",
        f"{facts['step_ms_median']:.1f} ms a step" if _is_number(facts.get("step_ms_median")) else "",
        f"{facts['tokens_per_s']:,.0f} tokens/s" if _is_number(facts.get("tokens_per_s")) else "",
        f"{100 * facts['mfu_ratio']:.1f} % MFU" if _is_number(facts.get("mfu_ratio")) else "",
    ]
    rows = [("Run", str(facts.get("run_id") or "?")), ("", "  ".join(part for part in parts if part))]
    if _is_number(facts.get("first_loss")) and _is_number(facts.get("last_loss")):
        rows.append(("Loss", _loss(facts)))
    if account is not None:
        rows.append(("Goodput", goodput_line(account)))
    if what_if is not None:
        rows.append(("What-if", what_if_line(what_if)))
    if interval := facts.get("checkpoint_interval"):
        rows.append(("Saves", _saves(interval)))
    rows.append(("Ended", str(facts.get("ended") or "without a word")))
    for excluded in (facts.get("excluded") or [])[:20]:
        device, node = excluded.get("device"), f"node {excluded.get('node_rank')}"
        where = f"{device} of {node}" if device else node
        rows.append(("Excluded", f"{where} after attempt {excluded.get('attempt')}: {excluded.get('reason')}"))
    for rollback in (facts.get("rollbacks") or [])[:20]:
        batches = ", ".join(map(str, rollback.get("skipped_batches") or []))
        rows.append(
            (
                "Rollback",
                f"step {rollback['from_step']} to {rollback['to_step']} from {rollback['tier'] or '?'}"
                f" ({rollback['reason'] or '?'})" + (f", skipped batch {batches}" if batches else ""),
            )
        )
    for label, key in (("Dropped", "dropped_records"), ("Probe errors", "probe_errors")):
        counts = facts.get(key) or {}
        if counts:
            rows.append((label, ", ".join(f"{name} {count}" for name, count in counts.items())))
    problems = facts.get("file_problems") or []
    label = "Left out" if "input" in facts else "Damaged"  # of other runs links and second files are told, too
    rows += [(label, f"{found['path']}: {found['problem']}") for found in problems[:10]]
    if len(problems) > 10:
        rows.append(("", f"... and {len(problems) - 10} more files"))
    table = _columns()
    for label, text in rows:
        table.add_row(_text(label, "dim"), _text(visible(text), ""))
    console.print(table)


def _loss(facts: Mapping[str, Any]) -> str:
    text = f"{facts['first_loss']:.4f} at the start, {facts['last_loss']:.4f} at the end"
    drop, ratio = facts.get("loss_drop"), facts.get("loss_drop_in_noise")
    if drop is None or ratio is None:
        return text
    verb = "fell" if drop > 0 else "rose"
    return f"{text}: {verb} by {abs(drop):.2f} (first to last tenth), {abs(ratio):.0f} x its noise"


def _listed(values: Sequence[Any]) -> str:
    shown = ", ".join(str(value) for value in values[:12])
    return shown if len(values) <= 12 else f"{shown}, ... ({len(values)} in all)"


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.0f} %" if abs(ratio) >= 0.1 else f"{100 * ratio:.2g} %"


def _count(number: Any, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}" if isinstance(number, int) and number else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _text(text: str, style: str) -> Text:
    from rich.text import Text

    return Text(text, style=style)  # a Text is not parsed for markup


def _indented(text: str, style: str) -> Any:
    from rich.padding import Padding

    return Padding(_text(visible(text), style), (0, 0, 0, 2))


def _pairs(rows: Sequence[tuple[str, str]], width: int) -> Any:
    """Names and values, two pairs a line where there is room; a long value has a line of its own."""
    from rich.padding import Padding
    from rich.table import Table

    beside = width >= 80
    table = Table.grid(padding=(0, 2))
    for i in range(2 if beside else 1):
        table.add_column(style="dim", min_width=18, max_width=24, overflow="fold")
        table.add_column(min_width=20 if beside and i == 0 else None, overflow="fold")
    short = [row for row in rows if len(row[1]) <= 24]
    long = [row for row in rows if len(row[1]) > 24]
    step = 2 if beside else 1
    for i in range(0, len(short), step):
        cells = [_text(visible(cell), "") for row in short[i : i + step] for cell in row]
        table.add_row(*cells)
    lines: list[Any] = [Padding(table, (0, 0, 0, 2))] if short else []
    lines += [_indented(f"{name:<18}  {value}", "") for name, value in long]
    from rich.console import Group

    return Group(*lines)


def _columns() -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=8, max_width=12, overflow="fold")
    table.add_column(overflow="fold", ratio=1)
    return table
