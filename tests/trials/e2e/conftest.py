"""No process of a run outlives its trial."""

from __future__ import annotations

from tests.e2e.conftest import nothing_is_left_running  # noqa: F401  # a fixture
