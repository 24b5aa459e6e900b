"""A diagnosis as Markdown for an incident ticket: verdict, evidence, actions taken, next step. No figures.

    Path("ticket.md").write_text(to_markdown(diagnosis, run.manifest()))

Text of the run is escaped for Markdown and HTML, and tracebacks are in fenced blocks that their content cannot close.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from analyzers.diagnose import Diagnosis
from analyzers.finding import Finding
from analyzers.report.terminal.diagnosis_text import evidence_rows, excluded_text, title
from analyzers.report.wording.account_lines import goodput_line, phases_line, pipeline_line, wall_s, what_if_line
from analyzers.report.wording.explained import next_step, why
from analyzers.report.wording.file_lines import file_lines
from analyzers.report.wording.loss_lines import loss_line
from analyzers.report.wording.stack_texts import stack_texts
from analyzers.wording import (
    batches_text,
    counted,
    end_text,
    is_number,
    number,
    number_ranges,
    of_world_size,
    ranks_before,
    sentence,
)
from probes.tape.redaction.printable import MAX_TEXT, escaped, visible, with_code

__all__ = ["to_markdown"]

MAX_FINDINGS = 20


def to_markdown(diagnosis: Diagnosis, manifest: Mapping[str, Any]) -> str:
    """The ticket's text; ends with a newline."""
    return "\n".join(_lines(diagnosis, manifest)) + "\n"


def _lines(diagnosis: Diagnosis, manifest: Mapping[str, Any]) -> Iterator[str]:
    facts, fired = diagnosis.run, diagnosis.cards[:MAX_FINDINGS]
    run = facts.get("run_id") or ""
    yield f"# {escaped(facts.get('run_id') or 'A run')}"
    yield ""
    first, *further = diagnosis.verdict.splitlines()
    yield f"**Verdict:** {_sentence(first)}"
    for line in further:
        yield ""
        yield _sentence(line)
    if fired:
        if (reason := why(fired[0])) != fired[0].summary:
            yield ""
            yield f"**Why:** {_sentence(reason)}"
        yield ""
        yield f"**Next:** {_sentence(next_step(fired[0], run))}"
    for place, finding in enumerate(fired, 1):
        yield from _finding(place, finding, run, closed=diagnosis.closed.get(finding.id, ""))
    yield from _actions_taken(diagnosis)
    if diagnosis.advised:
        yield from ("", "## Advice", "")
        yield from (
            f"- {_sentence(sentence(finding.summary))} {_sentence(next_step(finding, run))}"
            for finding in diagnosis.advised
        )
    in_verdict = {*diagnosis.verdict.splitlines()}
    if missing := [finding.summary for finding in diagnosis.not_judged if finding.summary not in in_verdict]:
        yield from ("", "## Not judged", "")
        yield from (f"- {_sentence(summary)}" for summary in missing)
    yield from ("", "## The run", "")
    yield from _table(_facts(diagnosis, manifest))


def _finding(place: int, finding: Finding, run: object, *, closed: str = "") -> Iterator[str]:
    notes = ", ".join(
        part for part in (finding.severity, "suspected" if finding.status == "suspect" else "", closed) if part
    )
    yield from ("", f"## {place}. {escaped(title(finding).capitalize())} ({escaped(notes)})", "")
    yield _sentence(finding.summary)
    yield ""
    rows = [("ranks", number_ranges(finding.ranks))] if finding.ranks else []
    if finding.first_step is not None:
        last = finding.last_step if finding.last_step is not None else finding.first_step
        steps = f"{finding.first_step}" if last == finding.first_step else f"{finding.first_step} to {last}"
        rows.append(("steps", steps))
    if finding.attempt is not None:
        rows.append(("attempt", str(finding.attempt)))
    rows += evidence_rows(finding)
    yield from _table(rows)
    for heading, frames in stack_texts(finding.evidence):
        yield from ("", f"{escaped(heading)}:", "")
        yield from _fenced(frames)
    message = finding.evidence.get("message")
    if isinstance(message, str) and message.strip():
        yield from ("", "Message:", "")
        yield from _fenced(message[:8_000].splitlines()[:60])
    yield from ("", f"Next: {_sentence(next_step(finding, run))}")


def _batches(rollback: Mapping[str, Any]) -> str:
    text = batches_text(rollback.get("skipped_batches") or [], rollback.get("replayed_batches") or [])
    return f" {sentence(text)}" if text else ""


def _actions_taken(diagnosis: Diagnosis) -> Iterator[str]:
    """Recovery actions, from the events of the run."""
    facts: Mapping[str, Any] = diagnosis.run
    done = [
        f"Refused the update of step {finding.first_step}."
        for finding in diagnosis.fired
        if finding.evidence.get("update_skipped") is True and finding.evidence.get("restored_step") is None
    ][:50]
    done += [
        f"Rolled back from step {back['from_step']} to {back['to_step']} ({back.get('tier') or '?'}): "
        f"{back.get('reason') or 'no reason recorded'}." + _batches(back)
        for back in (facts.get("rollbacks") or [])[:50]
    ]
    attempts = facts.get("attempts")
    if isinstance(attempts, int) and attempts > 1:
        done.append(f"Restarted the ranks {attempts - 1} time{'s' * (attempts > 2)}.")
    done += [f"Excluded {excluded_text(one)}." for one in (facts.get("excluded") or [])[:20]]
    yield from ("", "## Actions taken", "")
    nothing = "No refused step, rollback, restart or exclusion is recorded."
    yield from (f"- {_sentence(action)}" for action in done or [nothing])


def _facts(diagnosis: Diagnosis, manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts: Mapping[str, Any] = diagnosis.run
    mesh = " x ".join(f"{name} {size}" for name, size in (facts.get("mesh") or {}).items())
    seconds = wall_s(diagnosis.goodput, facts)
    nodes = counted(facts.get("num_nodes"), "node") or "an unknown number of nodes"
    before = f" ({ranks_before(facts)} before)" if ranks_before(facts) else ""
    ranks = facts.get("num_ranks")
    known = [
        ("ranks", f"{ranks}{of_world_size(facts)}{before} on {nodes}{f': {mesh}' if mesh else ''}" if ranks else ""),
        ("steps", str(facts["steps"]) if facts.get("steps") else ""),
        ("attempts", f"{facts['attempts']:,}" if facts.get("attempts") else ""),
        ("ended", end_text(facts)),
        ("step, median", f"{number(facts['step_ms_median'], 4)} ms" if facts.get("step_ms_median") else ""),
        ("wall time", "" if seconds is None else f"{seconds:,.1f} s"),
        ("tokens/s", number(facts["tokens_per_s"], 4) if facts.get("tokens_per_s") else ""),
    ]
    rows = [(name, text) for name, text in known if text]  # what was not recorded has no row
    if is_number(facts.get("first_loss")) and is_number(facts.get("last_loss")):
        rows.append(("loss", loss_line(facts)))
    if diagnosis.goodput is not None:
        rows.append(("goodput", goodput_line(diagnosis.goodput)))
    if diagnosis.what_if is not None:
        rows.append(("what-if", what_if_line(diagnosis.what_if, diagnosis.findings)))
    if pipeline := pipeline_line(diagnosis.findings):
        rows.append(("pipeline", pipeline))
    if phases := phases_line(facts.get("named_phases") or ()):
        rows.append(("phases", phases))
    rows += [(label.lower(), text) for label, text in file_lines(facts)]
    command = manifest.get("command")
    if isinstance(command, list):
        rows.append(("command", " ".join(map(str, command))))
    return rows


def _table(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    if rows:
        yield from ("| | |", "|---|---|")
        yield from (f"| {escaped(name)} | {escaped(value)} |" for name, value in rows)


def _sentence(text: str) -> str:
    """Escape a sentence written by Rankscope; commands and settings in it keep their backticks."""
    return with_code(escaped(text))


def _fenced(lines: Sequence[str]) -> Iterator[str]:
    shown = [visible(line)[:MAX_TEXT] for line in lines]
    longest = max((len(run) for line in shown for run in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    yield from (f"{fence}text", *shown, fence)
