"""The JSON report is what docs/report.schema.json says."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from analyzers.diagnose import diagnose
from analyzers.report.json import to_json
from analyzers.report.json_schema import schema
from tests.analyzers.account.test_pipeline_waits import pipeline
from tests.analyzers.hangs.test_hang_and_end import hung_killed_and_restarted
from tests.analyzers.memory_store import MemoryStore
from tests.analyzers.pipeline.test_stage_balance import on_devices
from tests.analyzers.rank_timings import Slow, simulate
from tests.analyzers.stragglers.test_straggler import stored
from tests.analyzers.test_diagnose import MANIFEST, clean_run

PAGE = Path(__file__).parents[3] / "docs" / "report.schema.json"


@functools.cache
def validator() -> jsonschema.Draft202012Validator:
    made = schema()
    jsonschema.Draft202012Validator.check_schema(made)
    return jsonschema.Draft202012Validator(made)


def test_the_page_is_what_the_module_prints() -> None:
    made = json.dumps(schema(), indent=2) + "\n"
    assert PAGE.read_text() == made, "python -m analyzers.report.json_schema > docs/report.schema.json"


@pytest.mark.parametrize(
    "make",
    [
        clean_run,
        MemoryStore,
        lambda: hung_killed_and_restarted().store,
        lambda: stored(simulate(2, steps=120, faults=[Slow(rank=3, step=60, factor=1.5)])),
        lambda: on_devices({0: 60}),  # waits split by durations of calls
        lambda: pipeline("without spans").store,
    ],
)
def test_reports_are_valid(make: Any) -> None:
    validator().validate(to_json(diagnose(make(), MANIFEST)))


@pytest.mark.parametrize(
    "broken", [{"verdict": None}, {"schema_version": 1}, {"findings": [{"kind": "hang"}]}, {"goodput": {}}]
)
def test_the_schema_refuses_what_it_should(broken: dict[str, Any]) -> None:
    report = to_json(diagnose(clean_run(), MANIFEST)) | broken
    with pytest.raises(jsonschema.ValidationError):
        validator().validate(report)
