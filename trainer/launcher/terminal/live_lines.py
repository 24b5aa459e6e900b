"""Lines on the terminal of a live run, for `rankscope train` and `rankscope run`.

    findings = FindingLines()
    if line := findings.line(event):        # "" if nothing is new
        print_wrapped(console, line)

A finding is announced once. Later lines report changes: it has become worse, its line of code is known, it is over, it
has recurred.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from analyzers.finding import Finding
from analyzers.kinds import OUR_KINDS, heading
from analyzers.live import changed
from analyzers.plugin_calls.named import MAX_OF_A_KIND
from analyzers.report.terminal.safe_console import with_bound_units, without_bound_units
from analyzers.report.wording.explained import next_step
from analyzers.wording import ranks_text
from probes.tape import event_kinds

__all__ = ["FindingLines", "print_wrapped"]

_COLOURS = {"critical": "red", "warning": "yellow"}


class FindingLines:
    """Remembers announced findings."""

    def __init__(self) -> None:
        self._announced: dict[str, Finding] = {}
        self._kinds: dict[str, int] = {}
        self._failed: set[str] = set()
        self._rolled_back_to: set[Any] = set()

    @property
    def count(self) -> int:
        """Number of announced findings."""
        return len(self._announced)

    def note_rollback(self, event: Mapping[str, Any]) -> None:
        """Note that a line has reported a rollback, so that findings do not repeat it."""
        self._rolled_back_to.add(event.get("to_step"))

    def line(self, event: Mapping[str, Any]) -> str:
        """Markup for an event of a finding or a failed plug-in; "" if it has nothing new."""
        if event["kind"] == event_kinds.ANALYZER_FAILED:
            return self._failed_line(str(event.get("analyzer")), str(event.get("reason")))
        if event["kind"] != event_kinds.FINDING:
            return ""
        now, key = Finding.of_event(event), str(event.get("id"))
        if now is None or now.status not in ("fired", "ok"):
            return ""
        before = self._announced.get(key)
        if before is None and now.status == "ok":  # this launch has not announced the finding, so do not report its end
            return ""
        now = self._announced[key] = self._without_rollback(now)
        title = escape(heading(now.kind))
        if now.status == "ok":
            return f"[green]{title}[/]  {escape(now.summary)}"
        colour = _COLOURS.get(now.severity, "cyan")
        if before is None:
            # a hang also gets the next step, because the run may print nothing from now on
            advised = f" {next_step(now).partition(' See `rankscope explain ')[0]}" if now.kind == "hang" else ""
            text = f"{now.summary}{advised}"
            return f"[{colour}]{title}[/]  {escape(text)}" if self._has_place(now) else self._last_line(now)
        if before.status == "ok":
            return f"[{colour}]{title}[/]  Again: {escape(now.summary)}"
        # If only the line of code is new, print just that line. The summary would only repeat the one printed before,
        # with other figures.
        earlier = {name: before.evidence.get(name) for name in ("line", "stacks")}
        known = replace(now, evidence={**now.evidence, **earlier})
        if now.summary != before.summary and changed(before, known):
            return f"[{colour}]{title}[/]  Update: {escape(now.summary)}"
        if (code := now.evidence.get("line")) and code != before.evidence.get("line"):
            who = ranks_text(now.ranks)
            return f"[{colour}]{title}[/]  {who[:1].upper()}{who[1:]}: most stack samples are at {escape(str(code))}."
        if (place := _stuck_at(now)) and place != _stuck_at(before):
            return f"[{colour}]{title}[/]  {escape(place)}."
        return ""

    def _without_rollback(self, finding: Finding) -> Finding:
        """The finding without its last sentence, if that repeats a reported rollback."""
        step = finding.evidence.get("restored_step")
        if step not in self._rolled_back_to:
            return finding
        return replace(finding, summary=finding.summary.partition(f" Rolled back to step {step} ")[0])

    def _failed_line(self, name: str, reason: str) -> str:
        """One line per failed plug-in; failures of Rankscope's own checks are only in the report."""
        if not name.startswith("plug-in ") or name in self._failed:
            return ""
        self._failed.add(name)
        return f"[dim]{escape(name[0].upper() + name[1:])}: {escape(reason)}[/]"

    def _has_place(self, finding: Finding) -> bool:
        count = self._kinds[finding.kind] = self._kinds.get(finding.kind, 0) + 1
        return finding.kind in OUR_KINDS or count <= MAX_OF_A_KIND

    def _last_line(self, finding: Finding) -> str:
        if self._kinds[finding.kind] > MAX_OF_A_KIND + 1:
            return ""
        return f"[dim]More {escape(finding.kind)} findings are in the report.[/]"


def _stuck_at(finding: Finding) -> str:
    """`Rank 1 is at train.py:18 step` for the first rank with a stack; empty without stacks."""
    stacks = finding.evidence.get("stacks")
    pairs = stacks.items() if isinstance(stacks, Mapping) else ()
    first = next(((rank, frames[0]) for rank, frames in pairs if frames), None)
    return f"Rank {first[0]} is at {first[1]}" if first else ""


def print_wrapped(console: Console, *markups: str, indent: int = 2) -> None:
    """Print lines with one write, so that output of ranks cannot appear between them.

    On a terminal, lines wrap between words with an indent; in a file they stay on one line.
    """
    if not console.is_terminal:
        for markup in markups:
            console.print(markup, highlight=False, soft_wrap=True)
        return
    lines = [line for markup in markups for line in _wrapped(console, Text.from_markup(markup), indent)]
    console.print(Text("\n").join(lines), highlight=False, no_wrap=True)


def _wrapped(console: Console, text: Text, indent: int) -> list[Text]:
    """Wrap a text to lines: the first as wide as the terminal, the others indented. A number is not separated from its
    unit."""
    text.plain = with_bound_units(text.plain)
    first = next(iter(text.wrap(console, max(20, console.width))), Text())
    first.rstrip()
    rest = text[len(first.plain) :]
    further = rest[len(rest.plain) - len(rest.plain.lstrip()) :] if rest.plain.strip() else None
    lines = [first]
    for line in further.wrap(console, max(20, console.width - indent)) if further is not None else ():
        line.rstrip()
        lines.append(Text(" " * indent) + line)
    for line in lines:
        line.plain = without_bound_units(line.plain)
    return lines
