"""`rankscope export --to`: each format is read back by the program that it is made for."""

from __future__ import annotations

import gzip
import json
import math
import re
import shlex
import shutil
from pathlib import Path

import duckdb
import fsspec
import pytest
from typer.testing import CliRunner, Result

from probes.tape.rundir import RunDir
from rankscope.cli import app
from store import Store
from tests.factories import make_run
from tests.wandb_file import config, history, summary, wandb_file, wandb_records

LAYERS = ("embedding.weight", "blocks.0.mlp.up.weight", "blocks.1.mlp.up.weight", "blocks.1.mlp.down.weight")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Three ranks, 60 steps: rank 2 is slow from step 30 on; then a second attempt that begins at step 51 again."""
    folder = tmp_path_factory.mktemp("exported")
    made = make_run(
        folder, ranks=3, steps=60, slow={2: 1.6}, slow_from=30, gradients_every=10, parameters=LAYERS, nan={1: 20},
        config={"optim": {"lr": 3e-4}, "run": {"name": "synthetic"}}, end="failed",
    )  # fmt: skip
    return make_run(
        folder, ranks=3, steps=10, first_step=51, run=made, attempt=1, gradients_every=10, parameters=LAYERS
    )


def export(run: RunDir, *arguments: str) -> Result:
    done = CliRunner().invoke(app, ["export", str(run.path), *arguments], env={"WANDB_MODE": "offline"})
    assert done.exit_code == 0, done.output
    return done


def test_tensorboard_reads_it_back(run: RunDir, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    out = tmp_path / "logs"
    for _ in range(2):  # the second time replaces the first
        export(run, "--to", "tensorboard", "--out", str(out))
    read = EventMultiplexer().AddRunsFromDirectory(str(out)).Reload()
    assert sorted(read.Runs()) == [".", "rank-00000", "rank-00001", "rank-00002"]
    losses = {event.step: event.value for event in read.Scalars(".", "train/loss")}
    assert sorted(losses) == list(range(1, 61))  # each once: those of the first attempt from 51 on are forgotten
    assert math.isnan(losses[20])
    assert losses[60] == pytest.approx(2.0 + 3.0 * math.exp(-60 / 40), rel=1e-6)
    own = [[event.value for event in read.Scalars(f"rank-{rank:05d}", "rank/own_work_seconds")] for rank in (0, 2)]
    assert sum(own[1][30:50]) / sum(own[0][30:50]) == pytest.approx(1 + 0.6 * 0.8, abs=0.03)
    walls = [event.wall_time for event in read.Scalars(".", "step/seconds")]
    assert walls == sorted(walls)
    assert {event.step for event in read.Tensors(".", "gradients/log10_layer_norm")} == {10, 20, 30, 40, 50, 60}
    assert [event.step for event in read.Scalars(".", "gradients/norm/blocks.1")] == [10, 20, 30, 40, 50, 60]
    text = read.Tensors(".", "findings/straggler")[0].tensor_proto.string_val[0].decode()
    assert "Rank 2 was slow" in text
    assert "rankscope explain straggler" in text
    assert "| optim.lr | 0.0003 |" in read.Tensors(".", "run/config")[0].tensor_proto.string_val[0].decode()
    assert "straggler" in read.Tensors(".", "run/summary")[0].tensor_proto.string_val[0].decode()


def test_wandb_gets_history_config_summary_and_findings(run: RunDir, tmp_path: Path) -> None:
    done = export(run, "--to", "wandb", "--out", str(tmp_path), "--ranks", "all")
    path = wandb_file(tmp_path)
    assert f"wandb sync {path.parent}" in done.output
    records = wandb_records(path)
    rows = [row for row in history(records) if "train/loss" in row]
    assert [row["step"] for row in rows] == [*range(1, 61), *range(51, 61)]
    assert rows[-1]["attempt"] == 1
    assert rows[40]["rank-00002/own_work_seconds"] > 1.4 * rows[40]["rank-00000/own_work_seconds"]
    with Store.open(run) as store:
        ((ended_ns,),) = store.rows("SELECT max(start_ns + duration_ns) FROM steps WHERE step = 7")
    assert rows[6]["_timestamp"] == pytest.approx(ended_ns / 1e9, abs=1e-3)  # not when it was exported
    assert config(records)["optim"] == {"lr": 3e-4}
    found = summary(records)
    assert found["steps_kept"] == 59  # of 70, one refused, ten trained twice
    assert found["verdict"].startswith("Already over: The forward pass of rank 1 gave a NaN or Inf loss at step 20.")
    (table,) = path.parent.glob("files/media/table/*.json")
    assert {row[0] for row in json.loads(table.read_text())["data"]} >= {"straggler", "non_finite"}


@pytest.mark.parametrize("place", ["folder", "memory"])
def test_parquet_is_a_hive_partitioned_lake(run: RunDir, tmp_path: Path, place: str) -> None:
    """A local folder read by DuckDB, a URL of fsspec read by pyarrow: the same rows as in the store."""
    out = str(tmp_path / "lake") if place == "folder" else f"memory://{tmp_path.name}"
    export(run, "--to", "parquet", "--out", out)
    export(run, "--to", "parquet", "--out", out)  # replaces its own files
    with Store.open(run) as store:
        wanted = store.rows("SELECT attempt, count(*), sum(duration_ns)::BIGINT FROM steps GROUP BY 1 ORDER BY 1")
        tables = {name for name in store.tables() if store.has(name) and store.rows(f"SELECT 1 FROM {name} LIMIT 1")}
    files = fsspec.filesystem("file" if place == "folder" else "memory")
    root = out.removeprefix("memory:/")
    written = {path.rpartition("=")[2] for path in files.ls(root, detail=False)}
    assert written == tables | {"runs"}
    if place == "folder":
        query = "FROM read_parquet(?, hive_partitioning = true) SELECT attempt, count(*), sum(duration_ns)::BIGINT "
        query += 'WHERE run = ? AND "date" = ? GROUP BY 1 ORDER BY 1'
        day = duckdb.execute("SELECT (now() AT TIME ZONE 'UTC')::DATE").fetchall()[0][0]
        found = duckdb.execute(query, [f"{out}/table=steps/**/*.parquet", run.run_id, day]).fetchall()
    else:
        import pyarrow.dataset

        data = pyarrow.dataset.dataset(f"{root}/table=steps", filesystem=files, partitioning="hive", format="parquet")
        assert set(data.schema.names) >= {"run", "date", "attempt", "rank", "step", "duration_ns"}
        read = data.to_table().group_by("attempt").aggregate([("step", "count"), ("duration_ns", "sum")]).to_pylist()
        found = sorted((row["attempt"], row["step_count"], row["duration_ns_sum"]) for row in read)
    assert found == wanted


def test_a_chrome_trace_of_some_steps(run: RunDir, tmp_path: Path) -> None:
    out = tmp_path / "trace.json.gz"
    export(run, "--to", "chrome-trace", "--out", str(out), "--steps", "10:12")
    events = json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    assert {event["name"] for event in events if event.get("tid") == 0 and event["ph"] == "X"} == {
        "step 10", "step 11", "step 12"}  # fmt: skip


def test_the_documented_commands_work(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of docs/export.md that need no server and no checkpoint, as they stand there, and what its SQL finds."""
    page = (Path(__file__).parents[1] / "docs" / "export.md").read_text(encoding="utf-8")
    commands = re.findall(r"(?m)^    rankscope ((?:export|report) runs/latest .*)$", page)
    commands = [command for command in commands if "safetensors" not in command and "llama" not in command]
    assert len(commands) == 5
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    shutil.copytree(run.path, tmp_path / "runs" / "latest")
    for command in commands:
        done = CliRunner().invoke(app, shlex.split(command))
        assert done.exit_code == 0, f"{command}: {done.output}"
    (sql,) = re.findall(r'(?m)^    duckdb -c "(.*)"$', page)
    assert len(duckdb.execute(sql).fetchall()) == 3
    made = {path.name for path in tmp_path.iterdir()}
    assert made >= {"lake", "trace.json.gz", "report.html", "ticket.md"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "parquet", "--out", "nowhere://x"], "nowhere"),
        (["--to", "tensorboard", "--out", "/dev/null/x"], "/dev/null/x cannot be written: Not a directory"),
        (["--to", "wandb", "--ranks", "some"], "--ranks some: choose none, sampled, all"),
        (["--to", "wandb", "--mode", "later"], "--mode later: choose online or offline"),
        (["--to", "chrome-trace", "--steps", "x"], "--steps x: write a range"),
        ([], "--out is missing"),
    ],
)
def test_mistakes_are_told_in_one_line(run: RunDir, arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["export", str(run.path), *arguments])
    assert done.exit_code == 2
    assert words in done.output
    assert done.output.count("\n") == 1
