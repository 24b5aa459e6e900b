"""The pages of logs, events, the configuration and the system: what they show, filter, and say where it is missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from analyzers.diagnose import diagnose
from analyzers.wording import recorded_ranks
from probes.tape.rundir import RunDir
from store import Store
from tests.dashboard.opened import open_page, shown
from tests.factories import RankWriter, make_run
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Two ranks with logs, a rollback and a kind of event of the script's own."""
    config = {"train": {"steps": 20, "precision": "bfloat16"}, "parallel": {"dp_shard": 2}}
    found = make_run(
        tmp_path_factory.mktemp("records"), ranks=2, steps=20, config=config,
        command=["rankscope", "train", "a b.toml"], versions={"python": "3.11", "torch": "2.13.0"},
        faults=["kill@step=9"], mesh={"dp_shard": 2},
    )  # fmt: skip
    writer = RankWriter(found, rank=0, attempt=1, ranks=2)
    writer.event("rollback", from_step=12, to_step=10, tier="memory", reason="loss was not finite", skipped_batches=[3])
    writer.event("team_note", colour="blue")
    writer.event("nccl_plugin", state="no_gpu", reason="no GPU")
    writer.close(clean=True)
    for rank in range(2):
        log = found.path / "logs" / "attempt-0" / f"rank-{rank:05d}.out.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("".join(f"step {step} of rank {rank}\n" for step in range(1, 21)))
    return found


def page(run: RunDir, name: str, **address: str) -> AppTest:
    app = open_page(run.path.parent, name, run=run.run_id, **address)
    assert not app.exception, [error.value for error in app.exception]
    return app


def test_log_lines_are_filtered_by_rank_step_and_text_of_the_address(run: RunDir) -> None:
    lines = page(run, "logs").dataframe[0].value
    assert len(lines) == 40
    filtered = page(run, "logs", **{"log-rank": "1", "log-step": "5-7", "log-text": "STEP 6"})
    assert "1 line. " in shown(filtered)
    lines = filtered.dataframe[0].value
    assert lines[["step", "rank", "line"]].values.tolist() == [[6, 1, "step 6 of rank 1"]]
    assert "No line matches" in shown(page(run, "logs", **{"log-rank": "9"}))
    assert "numbers and ranges" in shown(page(run, "logs", **{"log-step": "x"}))


def test_the_panel_of_a_rank_shows_the_last_lines_of_a_step(tmp_path: Path) -> None:
    found = make_run(tmp_path, ranks=2, steps=9)
    log = found.path / "logs" / "attempt-0" / "rank-00001.out.log"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"step 5 line {number}\n" for number in range(30)))
    app = page(found, "ranks", rank="1", step="5")
    told = "The last 16 of 30 lines that the rank printed in this step. The page Logs has all lines."
    text: str = wait_for(lambda: shown(app) if told in shown(app) else app.run() and "", "the panel")
    assert "line 13\n" not in text
    assert "line 14\n" in text
    assert "Peers: the other rank of its pipeline stage." in text


def test_events_are_filtered_and_routine_ones_left_out_until_chosen(run: RunDir) -> None:
    app = page(run, "events")
    rows = app.dataframe[0].value
    assert {"rollback", "team_note"} <= set(rows["kind"])
    assert not {"rank", "nccl_plugin"} & set(rows["kind"])
    (fields,) = rows.loc[rows["kind"] == "rollback", "fields"]
    assert "from_step=12" in fields
    assert "wall_ns" not in fields
    meanings = app.dataframe[-1].value.set_index("kind")["meaning"]
    assert meanings["rollback"] == "The run went back to an earlier state."
    assert meanings["team_note"] == "a kind defined by the script"
    assert set(page(run, "events", **{"event-kind": "nccl_plugin"}).dataframe[0].value["kind"]) == {"nccl_plugin"}
    assert len(page(run, "events", **{"event-text": "not FINITE"}).dataframe[0].value) == 1
    assert "No event matches" in shown(page(run, "events", **{"event-rank": "77"}))


def test_settings_are_listed_with_the_command_and_filtered(run: RunDir) -> None:
    app = page(run, "configuration")
    assert "rankscope train 'a b.toml'" in shown(app)
    assert "kill@step=9" in shown(app)
    rows = app.dataframe[0].value.values.tolist()
    assert ["train", "precision", "bfloat16"] in rows
    assert page(run, "configuration", setting="shard").dataframe[0].value.values.tolist() == [
        ["parallel", "dp_shard", "2"]
    ]


def test_the_system_page_shows_versions_ranks_and_what_is_not_recorded(run: RunDir) -> None:
    app = page(run, "system")
    text = shown(app)
    assert "Ranks: 2" in text
    assert "dp_shard 2" in text
    assert "No communicator of NCCL was recorded" in text
    assert "Variables of NCCL, gloo, CUDA and torch were not recorded" in text
    assert ["torch", "2.13.0"] in app.dataframe[0].value.values.tolist()
    tables = [table.value for table in app.dataframe]
    assert any("no_gpu" in table.to_numpy().tolist()[0] for table in tables)
    assert any({"rank", "host", "device"} <= set(table.columns) and len(table) == 2 for table in tables)
    assert not [name for table in tables for name in table.columns if name.endswith("_ns")]


@pytest.mark.parametrize(("steps", "ranks"), [(3, "3 of 4"), (0, "4")])
def test_the_system_page_counts_ranks_as_the_report_does(steps: int, ranks: str, tmp_path: Path) -> None:
    """After a restart, rank 3 has no records; or the attempt only begins, and one rank has recorded itself."""
    run = make_run(tmp_path, ranks=4, steps=3, end="")
    if steps:
        make_run(tmp_path, run=run, ranks=4, attempt=1, first_step=4, steps=steps)
        shutil.rmtree(run.rank_dir(1, 3))
    else:
        RankWriter(run, rank=0, attempt=1, ranks=4).close()
    with Store.open(run) as store:
        assert recorded_ranks(diagnose(store, run.manifest()).run) == f"{ranks} ranks"
    assert f"Ranks: {ranks}\n" in shown(page(run, "system"))


def test_a_run_without_logs_settings_or_versions_says_what_is_missing(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=1, steps=3)
    (run.path / "run.json").write_text(json.dumps({}))
    assert "has no logs" in shown(page(run, "logs"))
    text = shown(page(run, "configuration"))
    assert "missing or damaged" in text
    assert "No settings are recorded" in text
    assert "were not recorded" in shown(page(run, "system"))
    silent = make_run(tmp_path / "silent", ranks=1, steps=3)
    (silent.path / "logs").mkdir()
    (silent.path / "logs" / "launcher.log").touch()
    assert "printed nothing: 1 log file without a line" in shown(page(silent, "logs"))
    attached = make_run(tmp_path / "attached", ranks=1, steps=3)
    (attached.path / "logs").mkdir()
    (attached.path / "logs" / "watch-node0.log").touch()
    assert "has no logs" in shown(page(attached, "logs")), "watch's alone says nothing about what a script printed"


def test_checkpoints_of_every_tier_that_was_used_can_be_read(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=1, steps=9)
    writer = RankWriter(run, rank=0, attempt=1)
    writer.event("checkpoint", step=5, tier="remote", state="complete")
    writer.close()
    app = page(run, "recovery")
    assert app.dataframe[-1].value[["step", "tier"]].values.tolist() == [[5, "remote"]]


def test_gradients_that_were_not_measured_are_not_reported_as_finite(tmp_path: Path) -> None:
    text = shown(page(make_run(tmp_path, ranks=1, steps=9), "numerics"))
    assert "No gradient was measured by parameter." in text
    assert "NaN or Inf" not in text


def test_the_first_column_stays_and_the_newest_state_of_a_checkpoint_comes_before_the_earlier_ones(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path, ranks=1, steps=9)
    writer = RankWriter(run, rank=0, attempt=1)
    for state in ("writing", "complete", "verified"):
        writer.event("checkpoint", step=5, tier="disk", state=state)
    writer.close()
    shown = page(run, "recovery").dataframe[-1]
    (row,) = shown.value.to_dict("records")
    assert (row["state"], row["earlier states"]) == ("verified", "writing, complete")
    columns = json.loads(shown.proto.columns)
    assert {name for name, column in columns.items() if column.get("pinned")} >= {"step"}
    assert list(shown.value.columns)[:2] == ["step", "state"]
