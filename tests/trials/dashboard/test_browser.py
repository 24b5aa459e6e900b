"""How soon the page of a run that is training shows a fault of this moment."""

from __future__ import annotations

import signal
import time

import pytest

from tests.dashboard.test_browser import LONGEST_MS, Visit, visit
from tests.e2e.launched import kill

pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
__all__ = ["visit"]


def test_a_fault_is_a_finding_within_ten_seconds(visit: Visit) -> None:
    visit.open("overview")
    assert visit.page.get_by_text("Rank lost").count() == 0
    kill(visit.run.pids()[1], signal.SIGKILL)
    begun = time.monotonic()
    visit.page.wait_for_selector("text=Rank lost", timeout=10_000)
    visit.page.get_by_role("link", name="Evidence").first.click()
    visit.page.wait_for_selector("text=Runbook", timeout=LONGEST_MS)
    assert time.monotonic() - begun < 30
