"""Every page of a run whose store another process holds; `make test` opens four of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dashboard.test_unreadable_runs import READ_ANYHOW, read_a_held_store


@pytest.mark.timeout(600)
def test_every_page_reports_a_locked_store_and_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_a_held_store(tmp_path, monkeypatch, READ_ANYHOW)
