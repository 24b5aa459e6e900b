"""Real ranks that are slow by so much that no load hides them: one computes, one sleeps, one has a slow network.

Who is slow, and where, is asserted and nothing else: what else is found may be true of the machine at that moment.
Small delays, all places and clean runs: tests/trials/e2e; verdicts on exact inputs: tests/analyzers/stragglers.
"""

from __future__ import annotations

import gzip
import signal
from pathlib import Path
from typing import Any

from tests.e2e.launched import analysis_of, rankscope, start, train
from tests.e2e.script_ranks import ROOT, ScriptRanks
from tests.waiting import wait_for

DEADLINE_S = 200.0
PROFILED_STEPS = 2


def test_a_rank_that_computes_is_named_and_profiled_beside_a_peer(tmp_path: Path) -> None:
    """Rank 1 computes twenty times as long as the others; its trace and a peer's come while the run goes on."""
    run = start(
        tmp_path, "elastic", faults=["slow_compute@step=2,rank=1,factor=20"],
        settings=[
            "train.steps=20000", "train.global_batch_size=6", "checkpoint.interval=0", "profiler.on_anomaly=true",
            f"profiler.anomaly_steps={PROFILED_STEPS}", "profiler.max_captures=1",
        ],
        options=["--nproc-per-node", "3"],
    )  # fmt: skip
    (request,) = wait_for(lambda: run.events("profile_requested"), "a request", run, DEADLINE_S)
    suspect, peer = request["ranks"]
    assert (suspect, request["finding_kind"], request["num_steps"]) == (1, "straggler", PROFILED_STEPS)
    wait_for(lambda: len(run.events("profile_summary")) == 2, "a summary of both traces", run, DEADLINE_S)
    assert not run.has_ended()
    run.process.send_signal(signal.SIGTERM)
    run.finish(exit_code=None)

    captured = {rank: run.events("profile_captured", rank) for rank in range(3)}
    assert sorted(rank for rank, events in captured.items() if events) == sorted([suspect, peer])
    for rank in (suspect, peer):
        (event,) = captured[rank]
        assert (event["request"], event["first_step"]) == (request["request"], request["first_step"])
        assert event["last_step"] == event["first_step"] + PROFILED_STEPS - 1
        trace = gzip.decompress((run.run.path / event["path"]).read_bytes()).decode()
        assert f"ProfilerStep#{event['first_step']}" in trace
    (straggler,) = [finding for finding in run.findings("straggler") if finding["ranks"] == [suspect]]
    evidence = straggler["evidence"]
    paths = [captured[rank][0]["path"] for rank in (suspect, peer)]
    assert [evidence["profile_trace"], evidence["profile_trace_of_peer"]] == paths
    assert evidence["profile_peer_rank"] == peer
    assert evidence["profile_operators"], "which of them, without a busy host: trials/e2e/test_profiled_suspect.py"
    printed = rankscope("analyze", str(run.run.path), timeout_s=DEADLINE_S).stdout
    assert all(path in printed for path in paths)


def test_a_rank_that_sleeps_is_named_with_its_place(tmp_path: Path) -> None:
    """A third of a second in the forward pass of a plain script, whose steps take a few milliseconds."""
    run_dir, script = tmp_path / "run", ROOT / "tests" / "e2e" / "slow_ddp.py"
    with ScriptRanks(script, "forward", "30", "0.3", cwd=tmp_path, run_dir=run_dir, unattended=True) as ranks:
        ranks.join()
    (found,) = _named(analysis_of(run_dir), rank=1)
    assert found["evidence"]["place"] == "forward"
    assert "in forward" in found["summary"]
    assert found["evidence"]["excess_ms"] > 250


def test_a_rank_with_a_slow_network_is_named_with_its_collective(tmp_path: Path) -> None:
    """The kernel paces what rank 1 sends to 0.3 MB/s: a step takes a third of a second longer."""
    run = train(
        tmp_path, "hsdp", faults=["slow_link@step=5,rank=1,rate_mb=0.3"],
        settings=["train.steps=30", "checkpoint.interval=0"],
    )  # fmt: skip
    (found,) = _named(run.analyze(), rank=1)
    assert found["cause"] == "communication"
    assert "in communication" in found["summary"]


def _named(analysis: dict[str, Any], rank: int) -> list[dict[str, Any]]:
    """Stragglers of that rank."""
    fired = [one for one in analysis["findings"] if (one["kind"], one["status"]) == ("straggler", "fired")]
    return [one for one in fired if one["ranks"] == [rank]]
