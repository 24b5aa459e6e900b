"""Trials have a rate, not a truth value: how fast, how often, beside what load. `make test` leaves them out."""

from __future__ import annotations

from pathlib import Path

import pytest

_FOLDER = Path(__file__).parent
_TIMEOUT_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_FOLDER) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S))
