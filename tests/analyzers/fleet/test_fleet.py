"""The fleet's memory: who is named over many runs, what one run says, and that small samples condemn nobody."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from analyzers.diagnose import diagnose
from analyzers.finding import Finding
from analyzers.fleet.cached_histories import read_histories
from analyzers.fleet.fleet import COUNTED, fleet
from analyzers.fleet.history import Incident, RunHistory, history_of
from analyzers.fleet.rates import fit, posterior, tail
from benchmarks.scale.fleet import BAD_DEVICE, BAD_HOSTS, histories, suspicious
from rankscope.cli import app
from store import Store
from store.database import WriterLock
from store.runs_folder import RunsFolder
from tests.factories import RankWriter, empty_run, make_run, still_training


def test_bad_hosts_and_a_bad_device_are_named_and_no_good_one() -> None:
    named = [suspicious(histories(200, num_hosts=64, seed=seed)) for seed in range(5)]
    bad = {*BAD_HOSTS, BAD_DEVICE}
    assert sum(len(one & bad) for one in named) >= 18, "of 20"
    assert all(one <= bad for one in named), named


def test_a_healthy_fleet_has_nobody_above_the_line() -> None:
    healthy = [
        RunHistory(
            run_id=str(number),
            hours=10.0,
            hosts=tuple(f"host-{(number + k) % 40}" for k in range(8)),
            incidents=(Incident(kind="hang", cause="", host=f"host-{number % 40}"),) if number % 3 == 0 else (),
        )
        for number in range(200)
    ]
    assert not any(host.is_suspicious for host in fleet(healthy).hosts)


def test_one_bad_run_condemns_nobody() -> None:
    incident = Incident(kind="rank_lost", cause="signal", host="a")
    runs = [RunHistory(run_id="1", hours=1.0, hosts=("a", "b"), incidents=(incident,) * 20)]
    found = fleet(runs)
    assert found.hosts[0].name == "a"
    assert found.hosts[0].bad_runs == 1
    assert not found.hosts[0].is_suspicious


def test_rates_of_small_samples_are_drawn_to_the_fleet() -> None:
    prior = fit([1] * 50 + [0] * 50, [100.0] * 100)
    assert prior.shape / prior.hours == pytest.approx(0.005, rel=0.01)
    small, large = posterior(prior, count=1, hours=1.0), posterior(prior, count=100, hours=100.0)
    assert small.mean_per_h < 0.05, "one incident in an hour is no rate of one an hour"
    assert large.low_per_h < large.mean_per_h < large.high_per_h
    assert large.mean_per_h > 10 * small.mean_per_h
    assert tail(prior, count=0, hours=10.0) == 1.0
    assert tail(prior, count=5, hours=100.0) < 1e-2 < tail(prior, count=1, hours=100.0)


def test_what_one_run_says(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=4, steps=30, kill={1: 30})
    with Store.open(run) as store:
        history = history_of(store, run.manifest() | {"run_id": run.run_id}, diagnose(store, run.manifest()))
    assert [(one.kind, one.host) for one in history.incidents] == [("rank_lost", "node-0")]
    assert history.hosts == ("node-0",)
    assert history.hours > 0
    assert RunHistory.of_json(json.loads(json.dumps(history.to_json()))) == history


def test_runs_that_die_before_their_first_step_count(tmp_path: Path) -> None:
    run = empty_run(tmp_path, world_size=1)
    RankWriter(run, rank=0).close(clean=False)
    with Store.open(run) as store:
        history = history_of(store, run.manifest(), diagnose(store, run.manifest()))
    assert history.hosts == ("node-0",)
    dead = RunHistory(run_id="1", hosts=("a",), incidents=(Incident(kind="rank_lost", cause="signal", host="a"),))
    (host,) = fleet([dead]).hosts
    assert 0 < host.rate.mean_per_h < 100, "a start is an exposure"
    assert host.chance > 0.01, "one death in a start is no proof"


def test_hours_of_members_add_up_to_those_of_the_runs() -> None:
    runs = [RunHistory(run_id=str(n), hosts=("a",), hours=hours) for n, hours in enumerate((0.01, 2.0, 0.03))]
    found = fleet(runs)
    assert found.hours == pytest.approx(2.04)
    assert found.hosts[0].hours == pytest.approx(2.04)


def test_what_the_users_code_did_is_no_incident(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=4, steps=30, kill={1: 30})
    with Store.open(run) as store:
        diagnosis = diagnose(store, run.manifest())
        raised = [replace(finding, cause="exception") for finding in diagnosis.findings]
        history = history_of(store, run.manifest(), replace(diagnosis, findings=tuple(raised)))
    assert [one for one in history.incidents if one.kind == "rank_lost"] == []


@pytest.mark.parametrize(("replayed", "counts"), [({}, 0), ({"is_reproduced": True}, 0), ({"is_reproduced": False}, 1)])
def test_a_nan_counts_once_a_replay_did_not_reproduce_it(
    tmp_path: Path, replayed: dict[str, bool], counts: int
) -> None:
    run = make_run(tmp_path, ranks=2, steps=30)
    nan = Finding(
        analyzer="non_finite", kind="non_finite", severity="critical", status="fired", ranks=(1,), cause="forward",
        summary="", evidence=replayed,
    )  # fmt: skip
    with Store.open(run) as store:
        diagnosis = replace(diagnose(store, run.manifest()), findings=(nan,))
        history = history_of(store, run.manifest(), diagnosis)
    assert len(history.incidents) == counts


def test_a_run_that_died_is_a_failure_and_one_that_trains_is_none(tmp_path: Path) -> None:
    """Nobody records the end of a run whose launcher was killed, too."""
    make_run(tmp_path, ranks=2, steps=20, kill={1: 20})
    (dead,) = read_histories(RunsFolder(tmp_path / "runs")).histories
    assert (dead.failures, [one.kind for one in dead.incidents]) == (1, ["rank_lost"])
    run = still_training(make_run(tmp_path / "live", ranks=2, steps=20, hang={0: 20}))
    with Store.open(run):
        pass
    with WriterLock(run.store(), role="watch"):
        (live,) = read_histories(RunsFolder(tmp_path / "live" / "runs")).histories
    assert (live.failures, live.incidents) == (0, ())
    assert not (tmp_path / "live" / "runs" / ".fleet").exists()


def test_the_command_remembers_finished_runs(tmp_path: Path) -> None:
    make_run(tmp_path, ranks=2, steps=20, kill={1: 20})
    make_run(tmp_path, ranks=2, steps=20)
    runs = tmp_path / "runs"
    text = CliRunner().invoke(app, ["fleet", str(runs)])
    assert text.exit_code == 0, text.output
    assert "2 runs" in text.output
    assert " ".join(COUNTED.split()) in " ".join(text.output.split())
    assert "node-0" in text.output
    assert "No host or device has more trouble than chance explains." in text.output
    assert len(list((runs / ".fleet").glob("*.json"))) == 2
    again = json.loads(CliRunner().invoke(app, ["fleet", str(runs), "--format", "json"]).output)
    assert again["num_runs"] == 2
    assert again["hosts"][0]["bad_runs"] == 1
    assert CliRunner().invoke(app, ["fleet", str(runs), "--exclude", "slurm"]).stdout == ""
