"""Steps that programs printed: slower, waiting for data, not finite; and how a log without a cause ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.diagnose import Diagnosis
from analyzers.evidence.diagnose_files import SourceError, diagnose_files
from benchmarks.incidents.printed import printed


def _diagnosis(tmp_path: Path, text: str) -> Diagnosis:
    path = tmp_path / "train.log"
    path.write_text(text, encoding="utf-8")
    return diagnose_files([path])


@pytest.mark.parametrize("program", ["hf", "torchtitan", "fairseq", "megatron"])
def test_a_lasting_rise_of_the_duration(tmp_path: Path, program: str) -> None:
    first = _diagnosis(tmp_path, printed(program, steps=200, slow_from=100)).fired[0]
    assert (first.kind, first.cause) == ("throughput", "unknown")
    assert abs((first.first_step or 0) - 100) <= 5
    assert first.evidence["factor_ratio"] == pytest.approx(2.0, abs=0.1)


def test_every_twentieth_step(tmp_path: Path) -> None:
    first = _diagnosis(tmp_path, printed("litgpt", steps=240, every=20)).fired[0]
    assert (first.cause, first.evidence["every_steps"]) == ("periodic", 20)


def test_the_share_of_data_time(tmp_path: Path) -> None:
    first = _diagnosis(tmp_path, printed("mmengine", steps=30, data_share=0.8)).fired[0]
    assert first.kind == "data_bound"
    assert first.evidence["data_ratio"] == pytest.approx(0.8, abs=0.01)


def test_the_gradient_before_the_loss(tmp_path: Path) -> None:
    found = _diagnosis(tmp_path, printed("megatron", steps=80, gradient_from=50, nan_from=53)).fired
    assert [one.kind for one in found] == ["non_finite"]
    assert "gradient norm is not finite from step 50 on, the loss from step 53" in found[0].summary
    assert "rank 0" not in found[0].summary


def test_a_divergence_is_one_finding(tmp_path: Path) -> None:
    found = _diagnosis(tmp_path, printed("hf_lines", steps=300, diverge_from=200)).fired
    assert len(found) == 1
    assert "step 2" not in found[0].summary  # the lines are counted, and are no steps of the trainer


def test_steps_that_are_left_out(tmp_path: Path) -> None:
    first = _diagnosis(tmp_path, printed("megatron", steps=300, skip_from=200)).fired[0]
    assert first.evidence["skipped_steps"] == 101
    assert _diagnosis(tmp_path, printed("megatron", steps=60, skip_from=1)).fired == ()  # the search for a scale


def test_finished_running_and_ended_are_told_apart(tmp_path: Path) -> None:
    steps = printed("litgpt", steps=50)
    ends = {
        "finished": steps + "{'train_runtime': 61.0, 'train_loss': 3.0, 'epoch': 1.0}\n",
        "still running when the log was cut, or without a line": steps,
        "without a reason in the logs": steps + "closing\n" * 40,
    }
    for ended, text in ends.items():
        diagnosis = _diagnosis(tmp_path, text)
        assert (diagnosis.run["ended"], diagnosis.fired) == (ended, ())
        assert "50 printed steps" in diagnosis.verdict


def test_a_warning_in_a_job_that_finished_is_no_death(tmp_path: Path) -> None:
    error = "HTTPSConnectionPool(host='hub.example', port=443): Max retries exceeded with url: /"
    warning = f"WARNING:urllib3.connectionpool:{error}\n"
    assert _diagnosis(tmp_path, warning + printed("hf", steps=40, total=40)).fired == ()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", '{"alpha": [1, 2], "beta": 3}\n', "is a JSON document"),
        ("b.csv", "a,b\n1,2\n3,4\n", "is a CSV table"),
        ("c.log", "", "is empty"),
    ],
)
def test_other_files_are_named_as_what_they_are(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    try:
        verdict = diagnose_files([path]).verdict
    except SourceError as error:
        verdict = str(error)
    assert said in verdict
    assert "rankscope analyze --help lists what is read" in verdict
