"""Five questions to a finished run, each answered in a real browser within three clicks.

The address of the answer, opened in another browser, shows the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dashboard.launch import DashboardServer
from dashboard.screenshots import browser_path
from tests.dashboard.questions import BROWSER, LONGEST_MS, MAX_CLICKS, Question, evidence_of, menu, read, time_went
from tests.dashboard.test_pipeline_page import pipelined
from tests.depth import usually
from tests.factories import make_run

if TYPE_CHECKING:
    from playwright.sync_api import Page

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
pytestmark = [
    pytest.mark.skipif(browser_path() is None, reason="no Chromium: apt-get install chromium"),
    pytest.mark.timeout(600),
]


QUESTIONS = (
    Question(
        "which rank is slow, why, since when", "slower",
        (evidence_of("Straggler"),),
        ("text=/Rank 1 was slow from step 31 to the end: .* of compute per step/", "text='Why'", "text='Next'"),
    ),
    Question(
        "why did the loss jump", "slower", (evidence_of("Loss spike"),),
        ("text=/Loss rose from .* to 4.000 .* at step 70 on batch 70/", "text='Next'"),
    ),
    time_went("slower"),
    Question(
        "is the bubble right", "pipelined", (menu("Pipeline"),),
        ("[data-testid=stMetric]:has-text('Bubble'):has-text('27.3 %')",
         "[data-testid=stMetric]:has-text('Ideal'):has-text('27.3 %')"),
    ),
    Question(
        "which of two runs is better and why", "slower", (menu("Compare runs"),),
        ("text=/ is better than /", "text=/per token/"),
    ),
)  # fmt: skip

PASTED = usually({question.text: question for question in QUESTIONS}, later=[one.text for one in QUESTIONS[1:-1]])
"""Whose address is opened elsewhere: the one of a finding has a part more, the last has two runs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, one with a slow rank and a jump of the loss, and a pipeline."""
    path = tmp_path_factory.mktemp("questions")
    pipelined(path, attempts={0: range(1, 21)}).path.rename(path / "pipelined")
    make_run(path, ranks=3, steps=90, seed=2, config={"optim": {"lr": 0.1}}).path.rename(path / "before")
    make_run(
        path, ranks=3, steps=90, slow={1: 1.8}, slow_from=31, spikes={70: 4.0}, seed=1, config={"optim": {"lr": 0.2}}
    ).path.rename(path / "slower")
    return path


@dataclass(frozen=True, slots=True)
class Readers:
    """The pages of two browsers that share nothing, and the address of the server."""

    url: str
    asking: Page
    pasting: Page


@pytest.fixture(scope="module")
def readers(folder: Path) -> Iterator[Readers]:
    with DashboardServer(folder, port=0) as server, playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path(), args=BROWSER)
        asking, pasting = (browser.new_context(viewport={"width": 1440, "height": 1000}).new_page() for _ in range(2))
        yield Readers(server.url, asking, pasting)
        browser.close()


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.text)
def test_a_question_is_answered_within_three_clicks_and_by_its_address(readers: Readers, question: Question) -> None:
    assert len(question.clicks) <= MAX_CLICKS
    readers.asking.goto(f"{readers.url}/overview?run={question.run}", timeout=LONGEST_MS)
    for selector in question.clicks:
        readers.asking.locator(selector).first.click(timeout=LONGEST_MS)
    read(readers.asking, question)
    if question.text in PASTED:
        readers.pasting.goto(readers.asking.url, timeout=LONGEST_MS)
        read(readers.pasting, question)
