"""Speed of a configuration over runs: changes are found with their versions, and hardly any where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from analyzers.fleet.fleet import fleet
from analyzers.fleet.history import RunHistory
from analyzers.fleet.run_speed import run_speed
from analyzers.fleet.speed_changes import ConfigurationSpeed, SpeedChangePolicy, speeds
from benchmarks.scale.fleet import SPEED_NOISE, speed_runs
from dashboard.drawing.fleet_speed import speed_history
from rankscope.commands import fleet as fleet_command
from tests.analyzers.plain_run import plain_run
from trainer.config.load import load_config


def judged(*arguments: tuple[int, float], seed: int = 0, noise: float = SPEED_NOISE) -> ConfigurationSpeed:
    (found,) = speeds(speed_runs(seed, *arguments, noise=noise))
    return found


def test_false_alarms_stay_below_the_stated_level() -> None:
    alarms = sum(bool(judged((14, 1.0), seed=seed).changes) for seed in range(200))
    assert alarms <= 200 * SpeedChangePolicy().family_error_ratio


def test_five_percent_are_found_at_a_noise_of_two() -> None:
    found = [judged((12, 1.0), (12, 0.95), seed=seed) for seed in range(40)]
    slower = [one for one in found if one.status == "slower"]
    assert len(slower) >= 36
    assert sum(abs(one.changes[-1].index - 12) <= 1 for one in slower) >= 32
    assert np.median([one.changes[-1].ratio for one in slower]) == pytest.approx(0.95, abs=0.01)
    named = [one.changes[-1].versions for one in slower]
    assert sum(versions == {"torch": ("2.0", "2.1")} for versions in named) >= 34, "python did not change"


def test_a_regression_that_was_repaired_is_two_changes() -> None:
    found = judged((12, 1.0), (12, 0.8), (12, 1.0))
    assert [change.index for change in found.changes] == [12, 24]
    assert [change.first_run for change in found.changes] == ["run-12", "run-24"]
    assert (found.changes[0].ratio < 0.85, found.changes[1].ratio > 1.15, found.status) == (True, True, "faster")
    assert found.changes[0].with_versions == "torch 2.0 -> 2.1"


def test_one_run_on_a_bad_host_is_no_change() -> None:
    values = speed_runs(1, (10, 1.0), (1, 0.2), (10, 1.0))
    assert speeds(values)[0].status == "no_change"


def test_few_runs_are_not_judged() -> None:
    """Five before and five after, clearly apart: random orders separate them as well once in 126 times."""
    assert judged((5, 1.0), (5, 0.5)).status == "too_few_runs"
    assert judged((6, 1.0), (6, 0.5)).status == "slower"
    assert speeds(speed_runs(0, (1, 1.0))) == ()


def test_a_change_below_the_least_is_not_reported() -> None:
    assert judged((15, 1.0), (15, 0.985), noise=0.001).status == "no_change"


def test_the_limit_is_shared_by_the_configurations() -> None:
    """What a configuration alone can show needs more runs beside others that are tested, too."""
    alone = speed_runs(0, (6, 1.0), (6, 0.5))
    others = [run for name in "bcd" for run in speed_runs(1, (12, 1.0), configuration=name)]
    (found,) = [one for one in speeds([*alone, *others]) if one.configuration["train.compile"] == "a"]
    assert found.status == "too_few_runs"


def test_slower_configurations_stand_first_and_steps_count_without_tokens() -> None:
    found = speeds([*speed_runs(0, (12, 1.0)), *speed_runs(0, (12, 1.0), (12, 0.7), configuration="b", tokens=False)])
    assert [(one.status, one.unit) for one in found] == [("slower", "steps/s"), ("no_change", "tokens/s")]
    assert found[0].newest == pytest.approx(7.0, rel=0.05)


def test_a_run_says_how_fast_it_was_and_with_what() -> None:
    config = load_config(None, ["train.global_batch_size=8"]).model_dump(mode="json")
    manifest = {"run_id": "a", "config": config, "versions": {"torch": "2.13.0", "commit": 5}, "created_wall_ns": 7}
    facts = {"mesh": {"dp_replicate": 4}, "devices": ["cpu"], "num_nodes": 1}
    store = plain_run(ranks=4)
    speed = run_speed(store, manifest, facts)
    assert speed is not None
    assert (speed.run_id, speed.started_ns, speed.versions) == ("a", 7, {"torch": "2.13.0"})
    assert speed.step_ms == pytest.approx(100.0, rel=0.02)
    assert speed.tokens_per_s == pytest.approx(1e3 * 4 * 4096 / speed.step_ms)
    assert speed.configuration["train.global_batch_size"] == "8"
    assert "parallel.zero1" not in speed.configuration, "off: as in a version without that setting"
    assert run_speed(store, manifest | {"faults": ["kill@step=3,rank=1"]}, facts) is None, "a drill"
    history = RunHistory(run_id="a", speed=speed)
    assert RunHistory.of_json(json.loads(json.dumps(history.to_json()))) == history
    (found,) = fleet([history, history]).speeds
    assert (found.status, found.title) == ("too_few_runs", "dp_replicate 4, batch 8, cpu")


def test_an_attached_script_is_known_by_its_name_model_and_batch() -> None:
    manifest = {"attached": True, "command": ["/home/a/train.py", "--x"], "num_parameters": 124_000_000, "config": 5}
    speed = run_speed(plain_run(ranks=2), manifest, {"mesh": {}})
    assert speed is not None
    assert dict(speed.configuration) == {
        "num_parameters": "124000000", "script": "train.py", "tokens_per_step": "8192",
    }  # fmt: skip


def test_the_command_names_the_run_and_the_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Simulated histories stand in for the diagnosis of many folders."""
    known = [RunHistory(run_id=run.run_id, speed=run) for run in speed_runs(0, (12, 1.0), (12, 0.8))]
    monkeypatch.setattr(fleet_command, "_histories", lambda folder: known)
    monkeypatch.setenv("COLUMNS", "200")
    fleet_command.fleet([tmp_path])
    text = capsys.readouterr().out
    assert "run-12" in text
    assert "torch 2.0 -> 2.1" in text
    assert "1 changed, 0 without a change, 0 with too few runs to tell" in text
    fleet_command.fleet([tmp_path], output="json")
    (speed,) = json.loads(capsys.readouterr().out)["speeds"]
    assert (speed["status"], speed["changes"][0]["first_run"]) == ("slower", "run-12")


def test_the_figure_has_the_runs_and_their_medians() -> None:
    found = judged((12, 1.0), (12, 0.8))
    speed, median = speed_history(found).data
    assert len(speed.x) == 24
    assert sorted({round(value) for value in median.y}) == sorted(
        round(value) for value in (found.changes[0].after, found.changes[0].before)
    )


def test_settings_of_the_configuration_exist() -> None:
    from analyzers.fleet.run_speed import _SETTINGS

    config = load_config(None, []).model_dump(mode="json")
    assert [name for name in _SETTINGS if name.split(".")[1] not in config[name.split(".")[0]]] == []
