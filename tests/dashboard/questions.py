"""Questions that a reader asks of a run, the clicks that lead to the answer, and what the page then shows.

for selector in question.clicks: page.locator(selector).first.click()
read(page, question)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

__all__ = ["BROWSER", "LONGEST_MS", "MAX_CLICKS", "Question", "evidence_of", "menu", "read", "time_went"]

LONGEST_MS = 120_000
"""For what comes in a second on an idle machine."""
MAX_CLICKS = 3
BROWSER = ("--no-sandbox", "--disable-gpu-rasterization")
"""Arguments of Chromium: without a GPU its packages still draw by way of one, which costs three times as much."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the run it is about, the clicks from the run's Overview, and what the page then shows."""

    text: str
    run: str
    clicks: tuple[str, ...]
    answer: tuple[str, ...]


def menu(name: str) -> str:
    """The link to a page."""
    return f".st-key-menu a:has-text('{name}')"


def evidence_of(title: str) -> str:
    """The link from the card of a finding to its evidence."""
    return f"[class*=st-key-card-]:has-text('{title}') a:has-text('Evidence')"


def time_went(run: str) -> Question:
    """Where the time went, which every run answers in the same way."""
    figure = "[role=figure][aria-label='Wall time by category, down to training'] .main-svg >> text='wall time'"
    return Question("where did the time go", run, (menu("Goodput"),), (figure,))


def read(page: Page, question: Question, longest_ms: int = LONGEST_MS) -> None:
    """Wait for every part of the answer."""
    for part in question.answer:
        page.locator(part).first.wait_for(timeout=longest_ms)
