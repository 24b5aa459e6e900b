"""Nodes that come and go: each round is one attempt of one run, whatever its size and whoever was restarted."""

from __future__ import annotations

from pathlib import Path

import pytest

from probes.attach.launch.identity import LAUNCH, ROUND, Identity
from probes.attach.launch.joining import join_run
from probes.attach.open_recorder import open_recorder
from probes.tape.attempts import claims
from probes.tape.rundir import RunDir


def _joined(runs: Path, monkeypatch: pytest.MonkeyPatch, *, round: str, rank: int, of: int, restarts: int) -> int:
    """The attempt that a rank of this round finds in the only run."""
    for name, value in {
        LAUNCH: "job-20261127-101500-ab12", ROUND: round, "RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": of,
        "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank, "TORCHELASTIC_RESTART_COUNT": restarts,
        "TORCHELASTIC_RUN_ID": "job", "MASTER_ADDR": f"node-{round}", "MASTER_PORT": "29500",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    run, attempt, _ = join_run(Identity.from_environment(), runs_dir=runs, name="train", manifest={})
    run.rank_dir(attempt, rank).mkdir(parents=True, exist_ok=True)
    assert run.run_id == "train-job-20261127-101500-ab12"
    return attempt


def test_a_node_leaves_and_comes_back_with_another_count_of_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def joined(round: str, rank: int, of: int, restarts: int) -> int:
        return _joined(tmp_path, monkeypatch, round=round, rank=rank, of=of, restarts=restarts)

    assert [joined("a", rank, 2, 0) for rank in (0, 1)] == [0, 0]
    assert joined("b", 0, 1, 1) == 1
    assert [joined("c", 0, 2, 1), joined("c", 1, 2, 0)] == [2, 2], "the launcher of node 1 is a new one"
    (path,) = tmp_path.glob("train-*")
    assert [claimed["world_size"] for claimed in claims(RunDir(path)).values()] == [2, 1, 2]


def test_run_json_is_whole_if_rank_0_comes_before_the_rank_that_made_the_run_has_written_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {
        "RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0,
        "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_RUN_ID": "job", "MASTER_ADDR": "node", "MASTER_PORT": "29500",
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    identity = Identity.from_environment()
    made, is_first = RunDir.join(tmp_path / "runs", identity.job(), "train")  # by rank 1, which writes next
    assert is_first
    opened = open_recorder(identity, [], name="train", run_dir=None, config={})
    assert opened is not None
    recorder, run = opened
    recorder.close()
    assert run.path == made.path
    assert run.manifest().keys() >= {"run_id", "schema_version", "created_wall_ns", "attached", "command"}
