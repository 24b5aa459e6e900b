"""Every page at three widths, light and dark; `make test` looks at two of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dashboard.screenshots import PAGES
from tests.dashboard import test_screenshots
from tests.dashboard.test_screenshots import opened, pytestmark, run  # noqa: F401  # two fixtures, and what they need

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Page


@pytest.mark.parametrize("name", PAGES)
def test_no_page_scrolls_sideways_and_no_tile_is_cut(run: Path, opened: tuple[str, Page], name: str) -> None:  # noqa: F811
    test_screenshots.test_no_page_scrolls_sideways_and_no_tile_is_cut(run, opened, name)
