"""pytest plug-in: write the collected trials to a file, one line each: function, times, share that has to pass."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--listing", type=Path)


def pytest_collection_finish(session: pytest.Session) -> None:
    lines = []
    for item in session.items:
        marker = item.get_closest_marker("trial")
        options = {"times": 3, "at_least": 1.0, **(marker.kwargs if marker else {})}
        name = getattr(item, "originalname", item.name)
        lines.append(f"{name} {options['times']} {options['at_least']}")
    session.config.getoption("--listing").write_text("\n".join(dict.fromkeys(lines)))
