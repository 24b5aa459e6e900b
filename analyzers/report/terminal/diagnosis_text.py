"""A diagnosis for the terminal: verdict, evidence and next step, each finding with its numbers, facts of the run.

    render(diagnosis, rich.console.Console())

It prints plain text if the output is not a terminal. Text of the run is escaped, so that neither rich's markup nor
terminal control sequences in it have an effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from analyzers.checkpoints.policy import FailurePolicy
from analyzers.diagnose import Diagnosis
from analyzers.finding import Finding, evidence_of
from analyzers.kinds import heading
from analyzers.policy import SHARED
from analyzers.profiling.captures import capture_line
from analyzers.report.terminal.rank_table import SEVERITY_STYLES
from analyzers.report.wording.account_lines import goodput_line, phases_line, pipeline_line, wall_s, what_if_line
from analyzers.report.wording.explained import next_step, why
from analyzers.report.wording.file_lines import file_lines
from analyzers.report.wording.labels import label_of, shown
from analyzers.report.wording.links import finding_link
from analyzers.report.wording.loss_lines import loss_line, validation_line
from analyzers.report.wording.stack_texts import stack_texts
from analyzers.verdict.verdict import outcome
from analyzers.wording import batches_text, counted, counted_ranks, end_text, is_number, ranks_text, sentence
from probes.tape.redaction.printable import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

__all__ = ["evidence_rows", "excluded_text", "render", "saves_line", "title"]

_OUTCOME_STYLES = {"clean": "bold green", "failed": "yellow", "unjudged": "bold"}
"""Styles of a verdict without findings, by its outcome."""
_NOT_SHOWN = {
    "phase_factors_ratio",
    "phase_excess_ms",
    "stacks",
    "stack_groups",
    "traceback",
    "message",
    "differs",
    "doing",
    "last_seq_of_culprits",
    "named_by",
    "episodes",
    "whatif_basis",
    "classes",
    "action",
    "first_wall_ns",
    "sequence_numbers",
    "thread_errors",
}
_REPLAYED = {"step_ms": "mean step, measured", "step_without_it_ms": "mean step without it"}
"""Labels of step times that are means of the simulated steps, in contrast to the report's step time, the median of all
steps."""
MAX_VALUE = 120
ONE_PER_ROW = ("collect", "lines")
"""Commands and settings to copy, lines of a log: one per row, never cut."""
_COLUMNS = {
    "step_ms": "step",
    "compute_ms": "compute",
    "communication_ms": "communication",
    "exposed_ms": "exposed",
    "copies_ms": "copies",
    "idle_ms": "idle",
    "data_ms": "data",
}
MAX_ROWS = 64


def render(diagnosis: Diagnosis, console: Console, run: object = "") -> None:
    """Print the report. `run`: the run's folder as the user typed it."""
    run = run or diagnosis.run.get("run_id") or ""
    _head(diagnosis, console, run)
    for number, finding in enumerate(diagnosis.cards):
        console.print()
        _finding(finding, console, run, shown_above=number == 0, closed=diagnosis.closed.get(finding.id, ""))
        if link := finding_link(diagnosis.run, finding):
            # The link is not wrapped, because users copy it.
            console.print(_text(visible(f"  page: {link}"), "dim"), soft_wrap=True)
    advice = [f"{sentence(finding.summary)} {next_step(finding, run)}" for finding in diagnosis.advised]
    in_verdict = {*diagnosis.verdict.splitlines()}
    missing = [finding.summary for finding in diagnosis.not_judged if finding.summary not in in_verdict]
    for label, style, texts in (("Advice", "cyan", advice), ("Not judged", "dim", missing)):
        if texts:
            console.print()
            table = _columns()
            for text in texts:
                table.add_row(_text(label, style), _text(visible(text), style))
            console.print(table)
    console.print()
    _facts(diagnosis, console)
    facts: Mapping[str, Any] = diagnosis.run
    if "trace" in facts:  # the facts come from a profiler's traces
        render_ranks(facts["trace"]["ranks"], console)


def title(finding: Finding) -> str:
    """The title of the kind, in capitals."""
    return heading(finding.kind)


def _head(diagnosis: Diagnosis, console: Console, run: object) -> None:
    worst = diagnosis.fired[0] if diagnosis.fired else None
    first, *further = diagnosis.verdict.splitlines()
    lines = [
        (
            "Verdict",
            first,
            SEVERITY_STYLES[worst.severity] if worst else _OUTCOME_STYLES[outcome(diagnosis.verdict, diagnosis.run)],
        )
    ]
    lines += [("", line, "") for line in further]
    if worst:
        reason = why(worst)
        lines += [("Why", reason, "")] if reason != worst.summary else []
        lines.append(("Next", next_step(worst, run), ""))
    table = _columns()
    for label, text, style in lines:
        table.add_row(_text(label, "bold"), _text(visible(text), style))
    console.print(table)


def _finding(finding: Finding, console: Console, run: object, *, shown_above: bool, closed: str = "") -> None:
    where = f"  step {finding.first_step}" if finding.first_step is not None else ""
    if finding.last_step is not None and finding.last_step != finding.first_step:
        where = f"  steps {finding.first_step} to {finding.last_step}"
    ranks = f"  {ranks_text(finding.ranks)}" if finding.ranks else ""
    attempt = f"  attempt {finding.attempt}" if finding.attempt else ""
    suspect = "  suspected" if finding.status == "suspect" else ""
    head = _text(title(finding), SEVERITY_STYLES[finding.severity])
    over = f"  {closed}" if closed else ""
    head.append(visible(f"  {finding.severity}{suspect}{where}{ranks}{attempt}{over}"), style="dim")
    console.print(head)
    if not shown_above:
        console.print(_indented(finding.summary, ""))
    console.print(_pairs(evidence_rows(finding), console.width))
    for who, frames in stack_texts(finding.evidence):
        console.print(_indented(who, "dim"))
        for frame in frames:
            console.print(_indented(f"  {frame}", ""))
    for what, ranks_of in (evidence_of(finding).get("differs") or {}).items():
        console.print(_indented(f"{what}: {ranks_text(ranks_of)}", ""))
    if not shown_above:
        console.print(_indented(f"next: {next_step(finding, run)}", "dim"))


def evidence_rows(finding: Finding) -> list[tuple[str, str]]:
    """Names and values of the evidence and the cost, with units."""
    rows: list[tuple[str, str]] = []
    calls = finding.evidence.get("waiting_calls")
    has_numbers = "sequence_numbers" in finding.evidence and isinstance(calls, Mapping) and len(calls) > 1
    for name, value in [*finding.evidence.items(), ("cost_s", finding.cost_s or None)]:
        if name in _NOT_SHOWN or value is None or value == [] or value == "":
            continue
        if name == "waiting_calls" and isinstance(value, Mapping) and len(value) < 2:
            continue  # all ranks wait in one call, which other rows name
        if name in ONE_PER_ROW and isinstance(value, (list, tuple)):
            rows += [(label_of(name), str(each)) for each in value]
            continue
        if name in ("op", "seq") and has_numbers:  # these are of the first rank's call only, so leave them out
            continue
        if name == "reason" and str(value) in finding.summary:
            continue
        text = shown(name, value)
        label = _REPLAYED.get(name, "") if "replayed_first_step" in finding.evidence else ""
        rows.append((label or label_of(name), text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 3] + "..."))
    return rows


def saves_line(interval: Mapping[str, Any], num_steps: Any) -> str:
    """The suggested checkpoint interval, whether the run lasted that long, and the basis of the suggestion. Empty if
    the failure rate is assumed and the run was shorter, because the suggestion is meaningless for a short trial.
    """
    if is_number(num_steps) and interval["steps"] > num_steps and not interval["num_failures"]:
        return ""
    more = f", more than the {num_steps} recorded" if is_number(num_steps) and interval["steps"] > num_steps else ""
    failures = interval["num_failures"]
    rate = f"{counted(failures, 'failure')} in this run" if failures else "an assumed failure rate"
    few = "" if FailurePolicy().knows_rate(failures) else ", too few for a rate: a lower bound"
    return (
        f"Suggested checkpoint interval: {interval['steps']} step{'s' * (interval['steps'] != 1)} "
        f"({_duration(interval['interval_s'])}){more}. It loses the least time to saves and repeated steps with {rate} "
        f"(one failure in {_duration(interval['mtbf_s'])}{few}). "
        f"A save to disk stalls training for {1e3 * interval['cost_s']:.1f} ms (median of {interval['num_saves']})."
    )


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:,.0f} min" if seconds < 36_000 else f"{seconds / 3600:,.0f} h"


def _against_plan(plan: Sequence[Mapping[str, Any]]) -> str:
    """Traffic and memory against the plan."""
    differs = [
        f"{each['what']} {each['measured_bytes'] / each['planned_bytes'] - 1:+.0%}"
        for each in plan
        if not each["as_planned"]
    ]
    fits = [each["what"] for each in plan if each["as_planned"]]
    off = f"Bytes not as planned: {', '.join(differs)}." if differs else ""
    within = f"Bytes within {100 * SHARED.equal_ratio:.0f} % of the plan: {', '.join(fits)}." if fits else ""
    return " ".join(part for part in (off, within) if part)


def excluded_text(excluded: Mapping[str, Any]) -> str:
    """Clause on a device or node that was taken out of the run."""
    device, node = excluded.get("device"), f"node {excluded.get('node_rank')}"
    where = f"{device} of {node}" if device else node
    return f"{where} after attempt {excluded.get('attempt')}: {excluded.get('reason')}"


def _compared(few: Mapping[str, Any]) -> str:
    steps = f"Ranks were compared in {few['steps']} of {few['of']} steps."
    return f"{steps} Slowdowns that ended within {few['shortest_slowdown_steps']} steps may be missed."


def _ranks(facts: Mapping[str, Any]) -> str:
    """`4 ranks`; `lines of rank 3` if logs lack the lower ranks and the number of ranks."""
    printed = (facts.get("logs") or {}).get("ranks_that_printed") or []
    is_part = bool(printed) and len(printed) == facts.get("num_ranks") and max(printed) >= len(printed)
    return f"lines of {ranks_text(printed)}" if is_part else counted_ranks(facts)


def _facts(diagnosis: Diagnosis, console: Console) -> None:
    facts: Mapping[str, Any] = diagnosis.run
    mesh = " x ".join(f"{name} {size}" for name, size in (facts.get("mesh") or {}).items())
    devices = ", ".join(facts.get("devices") or [])
    seconds = wall_s(diagnosis.goodput, facts)
    parts = [
        _ranks(facts),
        mesh,
        devices,
        counted(facts.get("steps"), "step"),
        counted(facts.get("attempts"), "attempt"),
        f"{seconds:.1f} s" if seconds is not None else "",
        f"median step {facts['step_ms_median']:,.1f} ms" if is_number(facts.get("step_ms_median")) else "",
        f"{facts['tokens_per_s']:,.0f} tokens/s" if is_number(facts.get("tokens_per_s")) else "",
        f"{100 * facts['mfu_ratio']:.1f} % MFU" if is_number(facts.get("mfu_ratio")) else "",
    ]
    rows = [("Run", str(facts.get("run_id") or "?"))]
    if size := "  ".join(part for part in parts if part):
        rows.append(("", size))
    if facts.get("mfu_not_judged") and any(kind != "cpu" for kind in facts.get("devices") or []):
        rows.append(("MFU", f"Not judged: {facts['mfu_not_judged']}."))
    if is_number(facts.get("first_loss")) and is_number(facts.get("last_loss")):
        rows.append(("Loss", loss_line(facts)))
    if validation := facts.get("validation"):
        rows.append(("Validation", validation_line(validation)))
    if diagnosis.goodput is not None:
        rows.append(("Goodput", goodput_line(diagnosis.goodput)))
    if diagnosis.what_if is not None:
        rows.append(("What-if", what_if_line(diagnosis.what_if, diagnosis.findings)))
    if pipeline := pipeline_line(diagnosis.findings):
        rows.append(("Pipeline", pipeline))
    if phases := phases_line(facts.get("named_phases") or ()):
        rows.append(("Phases", phases))
    if (interval := facts.get("checkpoint_interval")) and (saves := saves_line(interval, facts.get("steps"))):
        rows.append(("Saves", saves))
    if plan := facts.get("plan_deviations"):
        rows.append(("Plan", _against_plan(plan)))
    read = (facts.get("files_read") or {}).items()
    if by_plugin := [f"{counted(number, 'file')} {what.removeprefix('file ')}" for what, number in read
                     if what.startswith("file of plug-in")]:  # fmt: skip
        rows.append(("Read", ", ".join(by_plugin)))
    rows.append(("Ended", end_text(facts)))
    for excluded in (facts.get("excluded") or [])[:20]:
        rows.append(("Excluded", excluded_text(excluded)))
    for rollback in (facts.get("rollbacks") or [])[:20]:
        batches = batches_text(rollback.get("skipped_batches") or [], rollback.get("replayed_batches") or [])
        rows.append(
            (
                "Rollback",
                f"step {rollback['from_step']} to {rollback['to_step']} from {rollback['tier'] or '?'}"
                f": {rollback['reason'] or 'no reason was recorded'}" + (f", {batches}" if batches else ""),
            )
        )
    rows += [("Profile", capture_line(capture)) for capture in (facts.get("captures") or [])[-20:]]
    for label, key in (("Dropped", "dropped_records"), ("Probe errors", "probe_errors")):
        counts = facts.get(key) or {}
        if counts:
            rows.append((label, ", ".join(f"{name} {count}" for name, count in counts.items())))
    if few := facts.get("steps_compared"):
        rows.append(("Compared", _compared(few)))
    rows += file_lines(facts)
    table = _columns()
    for label, text in rows:
        table.add_row(_text(label, "dim"), _text(visible(text), ""))
    console.print(table)


def _text(text: str, style: str) -> Text:
    from rich.text import Text

    return Text(text, style=style)  # rich does not search a Text for markup


def _indented(text: str, style: str) -> Any:
    from rich.padding import Padding

    return Padding(_text(visible(text), style), (0, 0, 0, 2))


def _pairs(rows: Sequence[tuple[str, str]], width: int) -> Any:
    """Names and values, two pairs per line if there is room; a value that is too long for that has its own line."""
    from rich.padding import Padding
    from rich.table import Table

    step = 2 if width >= 80 else 1
    pair_width = width // step - 4  # columns for a name and its value; the gaps after them take 4
    name_width = min(max((len(name) for name, _ in rows), default=0), 24, pair_width // 2 + 2)
    value_width = min(24, pair_width - name_width)
    table = Table.grid(padding=(0, 2))
    for _ in range(step):
        table.add_column(style="dim", width=name_width, overflow="fold")
        table.add_column(width=value_width, overflow="fold")
    short = [row for row in rows if len(row[1]) <= value_width]
    long = [row for row in rows if len(row[1]) > value_width]
    for i in range(0, len(short), step):
        cells = [_text(visible(cell), "") for row in short[i : i + step] for cell in row]
        table.add_row(*cells)
    lines: list[Any] = [Padding(table, (0, 0, 0, 2))] if short else []
    if width < 80:  # a column for the names would leave too little room
        lines += [_indented(f"{name:<18}  {value}", "") for name, value in long]
    elif long:
        rest = Table.grid(padding=(0, 2))
        rest.add_column(min_width=name_width if short else 18, max_width=24, overflow="fold")
        rest.add_column(ratio=1, overflow="fold")
        for row in long:
            rest.add_row(*(_text(visible(cell), "") for cell in row))
        lines.append(Padding(rest, (0, 0, 0, 2)))
    from rich.console import Group

    return Group(*lines)


def _columns() -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=8, max_width=12, overflow="fold")
    table.add_column(overflow="fold", ratio=1)
    return table


def render_ranks(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print the rows of the slowest ranks, ordered by rank: milliseconds per step, and the hidden share of
    communication.
    """
    from rich.table import Table

    shown = sorted(sorted(rows, key=lambda row: -row["step_ms"])[:MAX_ROWS], key=lambda row: row["rank"])
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for title in ("rank", "steps", *_COLUMNS.values(), "overlapped"):
        table.add_column(title, justify="right")
    for row in shown:
        hidden = row.get("overlap_ratio")
        values = [f"{row[name]:.4g}" for name in _COLUMNS]
        table.add_row(str(row["rank"]), str(row["steps"]), *values, "" if hidden is None else f"{100 * hidden:.0f} %")
    console.print("\nMilliseconds a step", style="dim")
    console.print(table)
    if len(rows) > len(shown):
        console.print(f"... and {len(rows) - len(shown)} more ranks (--format json has all)", style="dim")
