"""`rankscope explain`: every section that a finding can name is printed; a misspelt one gets suggestions."""

from __future__ import annotations

import io
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console
from typer.testing import CliRunner

from analyzers.finding import Finding
from analyzers.report.html.page_frame import RunbookPart
from analyzers.report.runbook_sections import RunbookSection, anchor_of, anchors, explain_command, section
from analyzers.report.wording.explained import next_step
from rankscope.cli import app
from rankscope.commands import explain

RUNBOOK = Path(__file__).parents[2] / "docs" / "runbook.md"


def explained(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["explain", *words])
    return done.exit_code, done.output


def test_every_anchor_of_the_runbook_is_a_section_with_a_text() -> None:
    named = set(re.findall(r'<a id="([\w-]+)"', RUNBOOK.read_text(encoding="utf-8")))
    assert len(named) > 150
    assert named <= set(anchors())
    for anchor in named:
        found = section(anchor)
        assert found is not None
        assert len(found.text) > 20, anchor
        assert "<a id" not in found.text, anchor


@pytest.mark.parametrize(
    ("given", "title"),
    [
        ("hang-not_entered", "A rank did not reach the collective"),
        ("#straggler-host", "Kept from running by its host"),
        ("docs/runbook.md#hang-gil", "A rank's interpreter does not answer"),
        ("hangs", "Hangs"),
        ("rank_lost_signal", "A rank died of a signal"),
        ("rank-lost-device_assert", "An assertion in a kernel failed"),
    ],
)
def test_a_section_is_found_as_people_write_it(given: str, title: str) -> None:
    code, text = explained(given)
    assert code == 0
    assert text.startswith(title)


def test_a_statement_on_a_terminal_has_one_blank_line_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=80, record=True)
    monkeypatch.setattr(explain, "console", lambda: screen)
    explain._print_section(cast(RunbookSection, section("straggler-host")), False)
    lines = [line.strip() for line in screen.export_text().strip().splitlines()]
    assert any(line.startswith("SELECT") for line in lines)
    assert not any(before == "" == after for before, after in pairwise(lines))


def test_what_next_names_can_be_pasted() -> None:
    finding = Finding(analyzer="x", kind="straggler", severity="warning", status="fired", summary="S.", cause="host",
                      ranks=(3,), advice="straggler-host")  # fmt: skip
    assert f"`{explain_command('straggler-host')}`" in next_step(finding)
    assert anchor_of(next_step(finding)) == "straggler-host"


def test_a_kind_lists_its_sections_and_nothing_lists_all() -> None:
    code, text = explained("straggler")
    assert code == 0
    assert {"straggler-compute", "straggler-data", "straggler-host"} <= set(re.findall(r"straggler-[\w-]+", text))
    code, text = explained("--format", "json")
    assert code == 0
    assert [row["section"] for row in json.loads(text)] == anchors()


@pytest.mark.parametrize(
    ("given", "meant"), [("hang-notentered", "hang-not_entered"), ("stragler-compute", "straggler-compute")]
)
def test_a_misspelt_section_gets_suggestions(given: str, meant: str) -> None:
    code, text = explained(given)
    assert code == 2
    assert f"did you mean {meant}" in text
    assert explained("\x1b[31m zzzzqq")[0] == 2


def test_a_report_links_to_the_sections_that_it_holds() -> None:
    part = RunbookPart(["straggler-host", "no-such-section", "straggler-host"])
    assert [anchor for anchor, *_ in part.sections] == ["straggler-host"]
    linked = part.linked("See `rankscope explain straggler-host` <b>or</b> `rankscope explain hang-gil`.")
    assert '<a href="#runbook-straggler-host"><code>rankscope explain straggler-host</code></a>' in linked
    assert "<b>" not in linked
    assert "#runbook-hang-gil" not in linked
    assert part.linked("Set `a<b` above 0.") == "Set <code>a&lt;b</code> above 0."
