"""The line of advice of a run that trains: whole sentences, text of the run as it is, no section of the runbook."""

from __future__ import annotations

from trainer.launcher.terminal.advice_line import advice_line


def test_a_line_says_what_is_and_what_to_do() -> None:
    event = {"summary": "[x] costs 19 %. The least is 2 %.", "next": "Change the setting. See `rankscope explain a`."}
    assert advice_line(event) == "[cyan]ADVICE[/]  \\[x] costs 19 %. The least is 2 %. Change the setting."
    assert advice_line({"summary": "A.", "next": "B."}) == "[cyan]ADVICE[/]  A. B."
