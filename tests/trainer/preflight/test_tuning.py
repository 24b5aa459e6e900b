"""Settings of the communication library: what is faster, what could not run, what is not a setting."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.trainer.preflight.simulated import cluster
from trainer.preflight.tuning import SettingsError, parse
from trainer.preflight.verdict.judge import judge
from trainer.preflight.verdict.readings import Readings, SettingReading

TREE = {"NCCL_ALGO": "Tree", "NCCL_PROTO": "Simple"}
SIZE = 1 << 26


def reading(milliseconds: float, **variables: str) -> SettingReading:
    return SettingReading(variables=variables, seconds={SIZE: milliseconds / 1e3})


def texts(*settings: SettingReading) -> list[str]:
    readings = replace(cluster(2), settings=settings)
    return [line.text for line in judge(readings).lines if line.check == "tuning"]


def test_a_setting_that_is_faster_in_each_reading_is_named_with_both_bandwidths() -> None:
    found = texts(
        reading(1.0), reading(1.2, NCCL_ALGO="Ring"), reading(0.8, **TREE),
        reading(1.1), reading(0.84, **TREE), reading(1.05), reading(0.82, **TREE),
    )  # fmt: skip
    assert found == [
        "An all-reduce of 64 MiB reaches 126 GB/s bus bandwidth without a setting, 157 GB/s with NCCL_ALGO=Tree "
        "NCCL_PROTO=Simple (25 % more)."
    ]


@pytest.mark.parametrize("others", [(0.8, 0.84, 1.02), (0.8,)], ids=["slower once", "read once"])
def test_a_setting_that_is_faster_by_chance_is_not_advised(others: tuple[float, ...]) -> None:
    (text,) = texts(*(reading(took) for took in (1.0, 1.1, 1.05)), *(reading(took, **TREE) for took in others))
    assert text.endswith("none of 1 settings is faster in each of 3 readings.")


def test_a_setting_that_cannot_run_is_named_with_the_reason() -> None:
    refused = SettingReading(variables={"NCCL_ALGO": "NVLS"}, seconds={}, problem="no algorithm/protocol available")
    assert texts(reading(1.0), refused)[-1] == (
        "Could not run with NCCL_ALGO=NVLS: no algorithm/protocol available."
    )  # fmt: skip


def test_nothing_is_compared_where_the_library_itself_failed() -> None:
    failed = SettingReading(variables={}, seconds={}, problem="rank 3 was killed")
    assert texts(failed, reading(0.8, **TREE)) == [
        "Without a setting, the all-reduce in new processes failed, so nothing is compared: rank 3 was killed."
    ]


def test_a_variable_that_pins_the_choice_is_a_warning() -> None:
    pinned = cluster(2, rank=lambda found: replace(found, settings={**found.settings, "NCCL_PROTO": "LL"}))
    (line,) = (line for line in judge(pinned).lines if line.check == "tuning")
    assert line.status == "warn"
    assert line.text.startswith("NCCL_PROTO=LL is set")


def test_readings_survive_json() -> None:
    readings = replace(cluster(2), settings=(reading(1.0), reading(0.8, **TREE)))
    assert Readings.of_json(json.loads(json.dumps(readings.to_json()))) == readings


def test_texts_become_settings() -> None:
    assert parse(["NCCL_ALGO=Tree NCCL_PROTO=Simple"]) == [TREE]
    assert {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL128"} in parse(["nccl"])


@pytest.mark.parametrize("text", ["tree", "", "NCCL_ALGO=", "=Tree", "NCCL-ALGO=Tree"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="NAME=VALUE"):
        parse([text])
