"""Lines on a terminal break between words; a plug-in's findings have a few lines at most."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from analyzers.finding import Finding
from trainer.launcher.terminal.live_lines import FindingLines, print_wrapped

SENTENCE = "Rank 1 has been slow since step 60: +74.1 ms of compute per step after the optimizer or in the next batch."


def test_a_line_breaks_between_words_and_goes_on_indented() -> None:
    written = io.StringIO()
    print_wrapped(Console(file=written, width=40, force_terminal=True, no_color=True), f"[red]{SENTENCE}[/]", indent=4)
    first, *further = written.getvalue().splitlines()
    assert all(len(line) <= 40 for line in (first, *further))
    assert all(line.startswith("    ") for line in further)
    assert " ".join([first, *(line.strip() for line in further)]) == SENTENCE


def test_a_number_and_its_unit_stay_on_one_line() -> None:
    said = (
        "NaN or Inf, which a replay did not reproduce. Rolled back to step 30 from memory in 0.1 s and kept batch 39."
    )
    for width in range(30, 110):
        written = io.StringIO()
        print_wrapped(Console(file=written, width=width, force_terminal=True, no_color=True), said)
        assert "0.1 s" in written.getvalue(), width
        assert written.getvalue().isascii()


def test_a_line_in_a_file_stays_whole() -> None:
    written = io.StringIO()
    print_wrapped(Console(file=written, width=40), SENTENCE)
    assert written.getvalue().splitlines() == [SENTENCE]


def test_a_line_of_code_that_a_hang_shows_later_stands_alone() -> None:
    lines = FindingLines()
    known = hang(5.6, {})
    later = hang(6.6, {"stacks": {"1": ["train.py:18 fetch", "train.py:30 main"]}})
    assert lines.line(known) == (
        "[red]HANG[/]  Rank 1 hangs. Rank 0 waited for 5.6 s. Inspect the stack of rank 1 and the code around the call."
    )
    assert lines.line(later) == "[red]HANG[/]  Rank 1 is at train.py:18 fetch."
    assert lines.line(later) == ""


def hang(waited_s: float, evidence: dict[str, Any]) -> dict[str, Any]:
    """As `watch` writes it."""
    finding = Finding(
        analyzer="hang", kind="hang", severity="critical", status="fired", ranks=(1,), cause="not_entered", attempt=0,
        summary=f"Rank 1 hangs. Rank 0 waited for {waited_s} s.", evidence=evidence,
    )  # fmt: skip
    columns = finding.to_json()
    of = {"finding_kind": columns.pop("kind"), "finding_ranks": columns.pop("ranks"), "kind": "finding"}
    return columns | of


def test_a_plug_in_with_many_findings_has_a_few_lines() -> None:
    lines = FindingLines()
    shown = [lines.line(event(number)) for number in range(20)]
    assert [line for line in shown if line] == [
        "[yellow]TEAM RULE[/]  Number 0.",
        "[yellow]TEAM RULE[/]  Number 1.",
        "[yellow]TEAM RULE[/]  Number 2.",
        "[dim]More team_rule findings are in the report.[/]",
    ]


def test_a_plug_in_that_fails_has_one_line() -> None:
    lines = FindingLines()
    failed = [{"kind": "analyzer_failed", "analyzer": name, "reason": f"it took {number} s"} for number in (1, 2)
              for name in ("plug-in team", "straggler")]  # fmt: skip
    assert [line for one in failed if (line := lines.line(one))] == ["[dim]Plug-in team: it took 1 s[/]"]


def event(number: int) -> dict[str, object]:
    return {
        "kind": "finding",
        "id": f"team_rule-0-{number}", "finding_kind": "team_rule", "analyzer": "team", "severity": "warning",
        "status": "fired", "summary": f"Number {number}.", "finding_ranks": [], "first_step": number, "last_step": None,
        "cause": "", "evidence": {}, "advice": "", "attempt": 0, "cost_s": None,
    }  # fmt: skip


def test_the_first_line_is_as_wide_as_the_terminal() -> None:
    written = io.StringIO()
    print_wrapped(Console(file=written, width=80, force_terminal=True, no_color=True), f"Verdict  {SENTENCE}", indent=9)
    first, second = written.getvalue().splitlines()
    longer = f"{first} {second.split()[0]}"
    assert len(first) <= 80 < len(longer), "another word would not fit"
    assert f"{first} {second.strip()}" == f"Verdict  {SENTENCE}"


class Writes(io.StringIO):
    """A terminal that counts what is written at once."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def write(self, text: str) -> int:
        self.count += 1
        return super().write(text)


def test_a_verdict_of_several_lines_is_written_at_once() -> None:
    """Ranks that end at the same moment print their tracebacks to the same terminal."""
    written = Writes()
    print_wrapped(
        Console(file=written, width=40, force_terminal=True, no_color=True), "", SENTENCE, "Stopping.", indent=9
    )
    assert written.count == 1
    lines = written.getvalue().splitlines()
    assert (lines[0], lines[-1]) == ("", "Stopping.")
