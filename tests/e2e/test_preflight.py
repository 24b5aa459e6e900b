"""`rankscope preflight` with real processes: the ranks of one machine. Eight nodes: tests/trials/e2e."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.depth import later
from tests.e2e.preflight_runs import ROOT, bad, environment
from tests.forked import run_python
from tests.ports import free_port
from tests.rankscope.test_json_schema import checked
from tests.waiting import wait_for
from trainer.preflight.verdict.report import EXIT_FAILED, EXIT_PASSED

TIMED = {"links", "all-reduce", "clocks", "matrix products"}
"""Checks of what was timed: on a crowded machine one link is truly far slower than the others."""


RANKS = [
    pytest.param("torch.distributed.run", 4, marks=later("the same under the launcher of ours, with two ranks")),
    ("rankscope", 2),
]


@pytest.mark.parametrize(("launcher", "num_ranks"), RANKS)
def test_ranks_of_one_machine(tmp_path: Path, launcher: str, num_ranks: int) -> None:
    words = ["--standalone"] if launcher == "torch.distributed.run" else ["run", "--run-dir", str(tmp_path / "run")]
    words += ["--nproc-per-node", str(num_ranks), "-m", "rankscope", "preflight"]
    options = ["--format", "json", "--runs", str(tmp_path), "--env", "PREFLIGHT_TOKEN"]
    variables = environment(PREFLIGHT_TOKEN="a-secret-of-mine")
    done = run_python(["-m", launcher, *words, *options], cwd=ROOT, env=variables, forks_python=True)
    report = json.loads(done.stdout[done.stdout.index("{") :])
    checked("preflight", report)
    failed = {check for check, line in bad(report).items() if line["status"] == "fail"}
    assert failed <= TIMED
    assert done.returncode == (EXIT_FAILED if failed else EXIT_PASSED), done.stderr
    readings = report["readings"]
    assert [reading["rank"] for reading in readings["ranks"]] == [*range(num_ranks)]
    assert {(link["source"], link["target"]) for link in readings["links"]} == {
        (a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b
    }
    assert all(link["bytes_per_s"] > 0 and link["latency_s"] > 0 for link in readings["links"])
    assert readings["all_reduce"]["bus_bytes_per_s"] > 0
    measured = [reading["rank"] for reading in readings["ranks"] if reading["matmul_flops_per_s"]]
    assert measured == [0], "the processor is measured once a node"
    assert not {"ranks", "versions", "settings"} & set(bad(report))
    assert readings["ranks"][0]["settings"]["PREFLIGHT_TOKEN"] == "(redacted)"


def test_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = run_python(
        ["-m", "rankscope", "preflight", "--timeout", "2", "--format", "json", "--runs", str(tmp_path)],
        cwd=ROOT, env=environment(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", **master),
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    checked("preflight", json.loads(done.stdout))
    assert bad(json.loads(done.stdout))["ranks"]["text"] == "Rank 1 of 2 did not answer."


@later("some twelve processes that import torch")
def test_the_all_reduce_is_measured_under_settings(tmp_path: Path) -> None:
    tuned = ["--tune", "GLOO_SOCKET_IFNAME=lo", "--tune", "GLOO_SOCKET_IFNAME=missing0"]
    words = ["-m", "rankscope", "preflight", "--nproc-per-node", "2", "--format", "json", "--runs", str(tmp_path)]
    done = run_python([*words, *tuned], cwd=ROOT, env=environment())
    report = json.loads(done.stdout[done.stdout.index("{") :])
    checked("preflight", report)
    readings = report["readings"]["settings"]
    assert [reading["variables"] for reading in readings[:3]] == [
        {}, {"GLOO_SOCKET_IFNAME": "lo"}, {"GLOO_SOCKET_IFNAME": "missing0"}
    ]  # fmt: skip
    assert all(took > 0 for took in readings[0]["seconds"].values())
    assert "missing0" in readings[2]["problem"]
    assert any("Could not run with GLOO_SOCKET_IFNAME=missing0" in line["text"] for line in report["lines"])


@later("three processes that import torch")
@pytest.mark.parametrize("has_joined", [False, True])
def test_a_signal_to_the_command_alone_leaves_no_rank(tmp_path: Path, has_joined: bool) -> None:
    mark = str(tmp_path)
    command = [sys.executable, "-m", "rankscope", "preflight", "--nproc-per-node", "2", "--runs", mark]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_for(lambda: len(_ranks(mark)) == 2, "both ranks", deadline_s=120)
    if has_joined:
        ranks = _ranks(mark)
        wait_for(lambda: all(b"libtorch" in (one / "maps").read_bytes() for one in ranks), "torch in both")
    process.terminate()
    process.communicate(timeout=100)
    assert process.returncode == 143
    wait_for(lambda: not _ranks(mark), "the end of both ranks", deadline_s=60)


def _ranks(mark: str) -> list[Path]:
    """Folders in /proc of the ranks that check this folder."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if mark.encode() in words and b"-u" in words and b"torch.distributed.run" not in words:
                found.append(folder)
    return found
