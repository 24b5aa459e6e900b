"""Scripts of the usual tutorial kind, with our two lines and with none: what is found, and that nothing is changed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import duckdb
import pytest
import torch

from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from tests.depth import later
from tests.e2e.launched import analysis_of
from tests.e2e.script_ranks import EXAMPLES, ROOT, ScriptRanks
from tests.forked import run_python
from tests.waiting import wait_for

STEPS = 50


def without_us(script: Path, folder: Path) -> Path:
    """The same script as its author had it before he heard of us."""
    lines = [line for line in script.read_text().splitlines() if "rankscope" not in line]
    plain = folder / f"plain_{script.name}"
    plain.write_text("\n".join(lines) + "\n")
    return plain


def same(one: Path, other: Path) -> bool:
    a, b = torch.load(one), torch.load(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def findings(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    fired = [finding for finding in analysis_of(run_dir)["findings"] if finding["status"] == "fired"]
    return [finding for finding in fired if finding["kind"] == kind]


def steps_of(run_dir: Path, rank: int) -> int:
    """Steps that a rank has finished, as the store knows it."""
    return len(query(run_dir, f"SELECT step FROM steps WHERE rank = {rank} AND duration_ns IS NOT NULL"))


def query(run_dir: Path, sql: str) -> list[tuple[Any, ...]]:
    store = RunDir(run_dir).store()
    try:
        with duckdb.connect(str(store), read_only=True) as connection:
            return connection.execute(sql).fetchall()
    except duckdb.Error:  # not made yet, or being written
        return []


def asked(run_dir: Path, sql: str) -> list[tuple[Any, ...]]:
    """Rows of a question that has some, once nobody writes the store."""
    found: list[tuple[Any, ...]] = wait_for(lambda: query(run_dir, sql), sql)
    return found


@later("a stopped rank: e2e/test_stopped_rank.py; the same bits: test_an_unchanged_script_is_recorded_and_not_changed")
def test_a_stopped_rank_is_named_and_the_parameters_are_those_of_the_script_alone(tmp_path: Path) -> None:
    script, run_dir = EXAMPLES / "fsdp2.py", tmp_path / "run"
    num_steps = 3 * STEPS  # seconds in which rank 1 can be stopped
    with ScriptRanks(
        without_us(script, tmp_path), "--save", "alone.pt", "--steps", str(num_steps), cwd=tmp_path
    ) as alone:
        alone.join()
    options = ("--save", "ours.pt", "--steps", str(num_steps))
    with ScriptRanks(script, *options, cwd=tmp_path, run_dir=run_dir) as ranks:
        tape = run_dir / "tapes" / "attempt-0" / "rank-00001"
        wait_for(lambda: any(tape.glob("steps.*")), "rank 1's first step")
        os.kill(ranks.pids[1], signal.SIGSTOP)
        events = RunDir(run_dir).node_dir(0) / "events.jsonl"

        def hang() -> list[dict[str, Any]]:
            told = [event for event in read_events(events)[0] if event["kind"] == "finding"]
            return [event for event in told if event["finding_kind"] == "hang"]

        try:
            (found,) = wait_for(hang, "the finding of a hang")
        finally:
            os.kill(ranks.pids[1], signal.SIGCONT)
        ranks.join()
    assert found["finding_ranks"] == [1]
    assert not [event for event in read_events(events)[0] if event["kind"] == "culprit_killed"]
    assert same(tmp_path / "ours.pt", tmp_path / "alone.pt")
    wait_for(lambda: steps_of(run_dir, 1) == num_steps, "all steps in the store")


@pytest.fixture(scope="module")
def plain_ddp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the DDP script comes to without us."""
    folder = tmp_path_factory.mktemp("plain")
    with ScriptRanks(without_us(EXAMPLES / "ddp.py", folder), "--save", "alone.pt", cwd=folder) as alone:
        alone.join()
    return folder


def test_an_unchanged_script_is_recorded_and_not_changed(tmp_path: Path, plain_ddp: Path) -> None:
    command = ["-m", "rankscope", "run", "--run-dir", "seen", "--nproc-per-node", "2"]
    done = run_python(
        [*command, str(plain_ddp / "plain_ddp.py"), "--save", "ours.pt"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        forks_python=True,
    )
    assert done.returncode == 0, done.stderr
    assert same(tmp_path / "ours.pt", plain_ddp / "alone.pt")
    run_dir = tmp_path / "seen"
    wait_for(lambda: steps_of(run_dir, 0) == steps_of(run_dir, 1) == STEPS, "all steps in the store")
    rows = asked(run_dir, "SELECT count(*), min(forward_ns), min(backward_ns), min(optimizer_ns) FROM steps")
    assert rows[0][0] == 2 * STEPS
    assert all(least > 0 for least in rows[0][1:])
    assert asked(run_dir, "SELECT count(*) FROM steps WHERE loss IS NULL OR grad_norm IS NULL OR lr IS NULL") == [(0,)]
    reduced = "SELECT count(DISTINCT step) FROM collectives WHERE rank = 1 AND op = 'all_reduce' AND step > 0"
    assert asked(run_dir, reduced) == [(STEPS,)]


def test_a_nan_in_the_data_is_found_on_its_rank(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(2)).tolist()
    poisoned = order[2 * 16 * 8 + 1]  # of the second rank, in its ninth batch
    options = ("--poison", str(poisoned), "--steps", "12")
    with ScriptRanks(EXAMPLES / "ddp.py", *options, cwd=tmp_path, run_dir=run_dir) as ranks:
        ranks.join()
    (found,) = findings(run_dir, "non_finite")
    assert (found["ranks"], found["first_step"]) == ([1], 9)


def test_a_guarded_loop_refuses_a_poisoned_batch_and_goes_back(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with ScriptRanks(EXAMPLES / "guarded.py", "--poison-step", "20", cwd=tmp_path, run_dir=run_dir) as ranks:
        ranks.join()  # it checks that the parameters are finite
    (found,) = findings(run_dir, "non_finite")
    assert (found["ranks"], found["first_step"]) == ([1], 21)
    told = read_events(run_dir / "tapes" / "attempt-0" / "rank-00000" / "events.jsonl")[0]
    (back,) = [event for event in told if event["kind"] == "rollback"]
    assert (back["to_step"], back["tier"], back["verdict"]) == (10, "memory", "non_finite")
