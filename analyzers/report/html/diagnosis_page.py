"""A diagnosis as one self-contained HTML file: no network, no server, no other file.

    page = render(store, diagnosis, run.manifest())
    path.write_bytes(page)

`page_frame` makes the frame of the page; this module makes the content.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from analyzers.account.wait_split import pipelines
from analyzers.communication.bandwidth import call_columns
from analyzers.diagnose import Diagnosis
from analyzers.figures import course, loss
from analyzers.figures.ranks import excess_map, heatmap, rank_step
from analyzers.figures.ranks.excess import load_excess
from analyzers.figures.time import collectives, goodput, schedule
from analyzers.figures.time.activity import schedule_of_step
from analyzers.finding import Finding, evidence_of
from analyzers.numerics.loss import why_spike
from analyzers.report.evidence import Drawing, drawings, moment
from analyzers.report.html.page_frame import FigurePage, PlacedFigure, Section
from analyzers.report.terminal.diagnosis_text import evidence_rows, title
from analyzers.report.terminal.why_spike_text import tables
from analyzers.report.wording.account_lines import bubble_of, claims_gain, wall_s, what_if_line
from analyzers.report.wording.explained import next_step, why
from analyzers.report.wording.file_lines import file_lines
from analyzers.report.wording.labels import label_of, shown
from analyzers.report.wording.links import finding_link
from analyzers.report.wording.stack_texts import stack_texts
from analyzers.run.records.evaluations import evaluations
from analyzers.source import Source, floats
from analyzers.verdict.verdict import outcome
from analyzers.wording import (
    end_text,
    group_text,
    listed,
    number,
    of_world_size,
    ranks_before,
    ranks_text,
    rate_text,
    sentence,
    size_text,
)
from probes.tape import event_kinds

__all__ = ["render"]

MAX_FINDINGS = 40
MAX_DRAWN = 12
"""Maximum number of findings for which evidence is drawn."""
MAX_SETTINGS = 300
MAX_ROWS = 64
MAX_CALLS, MAX_EVENTS = 12, 400


def render(source: Source, diagnosis: Diagnosis, manifest: Mapping[str, Any], *, version: str = "") -> bytes:
    """The page, UTF-8."""
    page = _Page(source, diagnosis)
    fired = diagnosis.cards[:MAX_FINDINGS]
    reason = why(fired[0]) if fired else ""
    findings = [page.finding(finding, number=number) for number, finding in enumerate(fired)]
    sections = list(page.sections())
    return page.sheet.render(
        run_id=diagnosis.run.get("run_id") or "a run",
        worst=fired[0].severity if fired else outcome(diagnosis.verdict, diagnosis.run),
        verdict=diagnosis.verdict,
        why=reason if fired and reason != fired[0].summary else "",
        next=next_step(fired[0], diagnosis.run.get("run_id") or "") if fired else "",
        quiet="",
        unshown=_cut(len(fired), len(diagnosis.cards)),
        tiles=_tiles(diagnosis),
        findings=findings,
        advised=[f"{sentence(finding.summary)} {next_step(finding)}" for finding in diagnosis.advised],
        not_judged=[finding.summary for finding in diagnosis.not_judged],
        explains=[finding.advice for finding in (*fired, *diagnosis.advised)],
        files=[f"{label} {text}".strip() for label, text in file_lines(diagnosis.run)],
        sections=sections,
        settings=_settings(manifest),
        footer=f"Made by rankscope {version} from the run's own records.".replace("  ", " "),
    )


class _Page:
    """Content of the page, in its order."""

    def __init__(self, source: Source, diagnosis: Diagnosis) -> None:
        self.source, self.diagnosis = source, diagnosis
        self.sheet = FigurePage()
        self.figure = self.sheet.figure

    def place(self, found: Iterator[Drawing]) -> list[PlacedFigure]:
        return [self.figure(drawing.figure, drawing.title) for drawing in found]

    def finding(self, finding: Finding, *, number: int) -> dict[str, Any]:
        reason = why(finding)
        return {
            "title": title(finding),
            "severity": finding.severity,
            "suspected": finding.status == "suspect",
            "where": _where(finding, self.diagnosis.closed.get(finding.id, "")),
            "summary": finding.summary,
            # The evidence of the first finding is at the top of the page.
            "why": "" if number == 0 or reason == finding.summary else reason,
            "next": next_step(finding, self.diagnosis.run.get("run_id") or "") if number else "",
            "link": finding_link(self.diagnosis.run, finding),
            "figures": self.place(drawings(self.source, finding)) if number < MAX_DRAWN else [],
            "numbers": evidence_rows(finding),
            "texts": _texts(finding),
        }

    def sections(self) -> Iterator[Section]:
        """Loss, goodput, ranks and steps, pipeline, timeline, collectives, events."""
        source, diagnosis = self.source, self.diagnosis
        curve = course.loss_curve(source)
        if len(curve["loss"]):
            figure = loss.draw(curve, course.marks(source), diagnosis.fired, evaluated=evaluations(source))
            yield Section(title="Loss", figures=[self.figure(figure, alt="Loss and gradient norm over the steps")])
        yield from self._spike()
        if account := diagnosis.goodput:
            steps = f"{account.num_kept} steps kept, {account.num_discarded} discarded"
            note = f"{account.wall_s:.1f} s of wall time, {steps}. {account.open_text}".rstrip()
            if account.basis == "steps":
                note += " No collectives were recorded: waits are split step by step."
            if diagnosis.what_if is not None:
                note += f" {what_if_line(diagnosis.what_if, diagnosis.findings)}"
            figures = [self.figure(goodput.waterfall(account), alt="Where the wall time went")]
            if len(account.by_rank) > 1:
                figures.append(self.figure(goodput.by_rank(account), "By rank"))
            yield Section(title="Where the time went", note=note, figures=figures)
        yield from self._ranks()
        yield from pipeline_sections(source, diagnosis.findings, self.figure)
        if figures := self.place(moment(source)):
            note = f"{figures[0].title}. Above: phases; below: collectives. Hatched: never ended."
            figures[0].title = ""
            yield Section(title="Timeline", note=note, figures=figures)
        yield from self._calls()
        yield from self._events()

    def _spike(self) -> Iterator[Section]:
        """The causes of the worst loss spike, if there is one."""
        try:
            found = why_spike.explain(self.source)
        except why_spike.SpikeError:
            return
        note = " ".join([found.summary, *(f"Not known: {line}" for line in found.unknown)])
        for position, (name, columns, rows) in enumerate(tables(found)):
            heading = f"Why the loss jumped: {name.lower()}"
            yield Section(title=heading, note=note if position == 0 else "", columns=columns, rows=rows)

    def _ranks(self) -> Iterator[Section]:
        """Each measure as a rank's excess over its peers, as on the dashboard's page of ranks; if no rank has peers, as
        recorded."""
        figures: list[PlacedFigure] = []
        marks = heatmap.marks_of(self.diagnosis.fired)
        for measure in rank_step.MEASURES:
            excess = load_excess(self.source, measure)
            if (excess.values > 0).any():
                figure = excess_map.draw(excess, marks=marks)
            else:
                matrix = rank_step.rank_step(self.source, measure)
                if not (matrix.values.size and (matrix.values > 0).any()):
                    continue
                figure = heatmap.draw(matrix, marks=marks)
            figures.append(self.figure(figure, measure, hidden=bool(figures)))
        if figures:
            note = (
                "Own work excludes waiting for others, so a slow rank stands out. It is compared with the median of "
                "the ranks of its pipeline stage in the same step, if there are others."
            )
            yield Section(title="Ranks and steps", note=note, figures=figures, tabs=True)

    def _calls(self) -> Iterator[Section]:
        calls = call_columns(self.source)
        if not len(calls["op"]):
            return
        size, took, bandwidth, wait = (floats(calls[n]) for n in ("bytes", "transfer_ms", "bus_gb_per_s", "wait_s"))
        rows = [
            (str(calls["op"][i]), group_text(str(calls["process_group"][i])), size_text(float(size[i])),
             f"{int(calls['num_calls'][i]):,}", _known(took[i], "ms"), _rate(bandwidth[i]),
             _known(wait[i], "s"))
            for i in range(min(MAX_CALLS, len(calls["op"])))
        ]  # fmt: skip
        has_waits = bool(np.isfinite(wait).any())
        dots = " A larger dot means more waiting, summed over all ranks." if has_waits else ""
        yield Section(
            title="Collectives",
            note="Finished calls only. Transfer is the time of the member that arrived last, which did not wait."
            f"{dots}{_cut(len(rows), len(calls['op']))}",
            figures=[self.figure(collectives.draw(calls), alt="Bandwidth by operation, size and group")],
            columns=("operation", "group", "size", "calls", "transfer", "bus bandwidth", "waited, all ranks"),
            numeric=range(2, 7),
            rows=rows,
        )

    def _events(self) -> Iterator[Section]:
        found = course.story(self.source, limit=MAX_EVENTS)
        shown = [event for event in found if not _is_routine(event)]
        note = f"The first and the last {MAX_EVENTS // 2} events of the run." if len(found) == MAX_EVENTS else ""
        if shown:
            begin = shown[0].wall_ns
            rows = [
                (
                    f"{(t.wall_ns - begin) / 1e9:.2f}",
                    "node" if t.rank < 0 else str(t.rank),
                    "" if t.step is None else str(t.step),
                    t.kind.replace("_", " "),
                    _detail(t.detail),
                )
                for t in shown
            ]
            columns = ("seconds", "rank", "step", "event", "")
            yield Section(title="Events", note=note, columns=columns, numeric=(0, 1, 2), rows=rows)


def _cut(num_shown: int, num: int) -> str:
    """Return the end of a note on a cut table, which shows the most important rows."""
    return f" Shown: the first {num_shown:,} of {num:,}." if num_shown < num else ""


def _known(value: float, unit: str) -> str:
    return f"{number(float(value))} {unit}" if value == value else "not measured"


def _rate(gb_per_s: float) -> str:
    return rate_text(float(gb_per_s)) if gb_per_s == gb_per_s else "not measured"


def _where(finding: Finding, closed: str) -> str:
    first, last = finding.first_step, finding.last_step
    steps = "" if first is None else f"step {first}" if last in (None, first) else f"steps {first} to {last}"
    who = ranks_text(finding.ranks) if finding.ranks else ""
    attempt = f"attempt {finding.attempt}" if finding.attempt else ""
    return ", ".join(part for part in (steps, who, attempt, closed) if part)


def _texts(finding: Finding) -> list[tuple[str, list[str]]]:
    """Stacks, messages and tracebacks, which are collapsed at first."""
    found = stack_texts(finding.evidence)
    message = finding.evidence.get("message")
    if isinstance(message, str) and message.strip():
        found.append(("Message", message[:20_000].splitlines()[:200]))
    return found


def _tiles(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    facts: Mapping[str, Any] = diagnosis.run
    what_if = diagnosis.what_if
    tiles = [
        ("ranks", facts.get("num_ranks"), "{:,}" + of_world_size(facts)),
        ("steps", facts.get("steps"), "{}"),
        ("attempts", None if facts.get("attempts") == 1 else facts.get("attempts"), "{:,}"),
        ("wall time", wall_s(diagnosis.goodput, facts), "{:,.1f} s"),
        (
            "goodput",
            100 * ratio if diagnosis.goodput and (ratio := diagnosis.goodput.goodput_ratio) is not None else None,
            "{:.1f} %",
        ),
        (
            f"faster with evenly spread work, error {100 * what_if.error_ratio:.1f} %" if what_if else "",
            what_if.gain if what_if and claims_gain(what_if) else None,
            "{:.2f}x",
        ),
        ("ms per step, median", facts.get("step_ms_median"), "{:,.4g}"),
        ("tokens/s", facts.get("tokens_per_s"), "{:,.0f}"),
        ("MFU", 100 * share if isinstance(share := facts.get("mfu_ratio"), float) else None, "{:.1f} %"),
        (
            "loss, last" if facts.get("loss_lost_at_step") is None else "last finite loss",
            facts.get("last_loss"),
            "{:.4f}",
        ),
        ("validation loss, last", (facts.get("validation") or {}).get("last_loss"), "{:.4f}"),
    ]
    shown = [(name, form.format(value)) for name, value, form in tiles if isinstance(value, (int, float))]
    if before := ranks_before(facts):
        shown.insert(1, ("ranks before", before))
    return [*shown, ("ended", end_text(facts))]


_LAUNCH = {
    "command": "command",
    "cwd": "working directory",
    "faults": "faults to inject",
    "world_size": "ranks",
    "num_parameters": "parameters of the model",
    "device_name": "GPU",
    "rankscope_version": "version of rankscope",
    "versions": "versions",
    "environment": "environment",
    "float32_matmul_precision": "torch.float32_matmul_precision",
}
"""Facts of the launch that are shown before the settings, with their labels."""


def _settings(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The launch and the settings, for people: no process id, digest or clock value of the manifest."""
    flat: list[tuple[str, str]] = []

    def walk(prefix: str, value: Any, depth: int) -> None:
        if len(flat) >= MAX_SETTINGS:
            return
        if isinstance(value, Mapping) and depth < 6:
            for key, item in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), item, depth + 1)
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            flat.append((prefix[:120], text if len(text) <= 200 else text[:199] + "…"))

    for name in _LAUNCH:
        if manifest.get(name):
            value = manifest[name]
            walk(_LAUNCH[name], shlex.join(map(str, value)) if name == "command" and type(value) is list else value, 1)
    config = manifest.get("config")
    walk("", config if isinstance(config, Mapping) else {}, 0)
    return flat


def _is_routine(event: course.StoryEvent) -> bool:
    """Return True for events without a row: copies in memory are taken every few steps, so only a rollback to one gets
    a row."""
    routine = ("writing", "complete", "verified", "good", "removed")
    detail = event.detail
    return event.kind == event_kinds.CHECKPOINT and detail.get("tier") == "memory" and detail.get("state") in routine


_EVENT_LABELS = {"bytes": "size", "exit_rank": "rank", "state_rank": "rank"}
"""Labels for fields of events that have another meaning, and another label, in a finding's evidence."""


def _measured(key: str, value: Any) -> tuple[str, str]:
    """A name and its value in readable units; values inside another value are listed with their own names."""
    if isinstance(value, Mapping):
        return key.replace("_", " "), ", ".join(
            " ".join(_measured(str(name), each)).strip() for name, each in value.items()
        )
    if isinstance(value, (list, tuple)):
        if "ranks" in key.split("_") and all(type(each) is int for each in value):
            return "", ranks_text(value)
        return key.replace("_", " "), listed([_measured("", each)[1] for each in value])
    if isinstance(value, (int, float)) and not isinstance(value, bool) and key.endswith("_ns"):
        return key[:-3].replace("_", " "), f"{value / 1e9:.3g} s" if value >= 1e9 else f"{value / 1e6:.3g} ms"
    return _EVENT_LABELS.get(key) or (label_of(key) if key else ""), shown(key, value)


def _detail(detail: Mapping[str, Any]) -> str:
    known = event_kinds.COMMON_FIELDS
    parts = []
    for key, value in detail.items():
        if key not in known and value not in (None, "", [], {}) and value == value:  # a NaN means "not known"
            name, text = _measured(key, value)
            parts.append(f"{name} {text}".strip() if len(text) <= 120 else f"{name} {text[:119]}…".strip())
    return ", ".join(parts)[:400]


def pipeline_sections(
    source: Source, findings: Sequence[Finding], place: Callable[..., PlacedFigure]
) -> Iterator[Section]:
    """The section on pipelines; none if the bubble was not measured. `place` puts a figure onto the page."""
    found = bubble_of(findings)
    if found is None or found.attempt is None or found.last_step is None:
        return
    numbers = evidence_of(found)
    figures = []
    members = next((ranks for attempt, ranks in pipelines(source) if attempt == found.attempt), [])
    pieces = schedule_of_step(source, found.attempt, found.last_step, members)
    if len(pieces["stage"]):
        alt = "Forwards and backwards of each stage"
        figures.append(place(schedule.draw(pieces), f"Step {found.last_step} as it ran", alt=alt))
    expected = numbers["idle_expected_ratio"]
    every = {int(rank): share for rank, share in numbers["idle_ratio_by_rank"].items()}
    drawn = [rank for rank in members if rank in every] or list(every)[:MAX_ROWS]
    by_rank = {f"rank {rank}": every[rank] for rank in drawn}
    heading = "Bubble by rank" + (", of this pipeline" if len(drawn) < len(every) else "")
    alt = "Idle share of each rank of the pipeline"
    figures.append(place(schedule.idle(by_rank, expected=expected), heading, alt=alt))
    by_step = {int(step): share for step, share in numbers["idle_ratio_by_step"].items()}
    alt = "Idle share of the pipeline over the steps"
    figures.append(place(schedule.idle_by_step(by_step, expected=expected), "Bubble by step", alt=alt))
    rows = [(stage, f"{work_ms:.4g}") for stage, work_ms in list(numbers["work_ms_by_stage"].items())[:MAX_ROWS]]
    yield Section(
        title="Pipeline",
        note=f"{found.summary} Means over {numbers['num_steps_measured']} typical steps. "
        "The numbers in the drawn step are microbatches.",
        figures=figures,
        columns=("stage", "work a step, ms"),
        numeric=(0, 1),
        rows=rows,
    )
