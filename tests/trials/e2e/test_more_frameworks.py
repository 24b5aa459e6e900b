"""The examples for Accelerate and Lightning's Fabric; `make test` runs those for the Trainer and Lightning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_frameworks import (  # noqa: F401  # run here on the folder below
    example_runs,
    test_a_nan_in_the_data_is_found,
    test_every_step_and_phase_is_recorded,
    test_results_are_bitwise_equal_without_probes,
)


@pytest.fixture(scope="module", params=["accelerate", "fabric"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield from example_runs(request.param, 2, tmp_path_factory)
