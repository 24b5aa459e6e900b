"""A slow rank is left out of the run or replaced, if `recovery.on_straggler` says so; so is a broken device."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from probes.tape.events import read_events
from tests.e2e.launched import LaunchedRun, start
from tests.ports import free_port
from tests.waiting import wait_for

DEADLINE_S = 200.0
SLOW = "slow_compute@step=15,rank=1,factor=40"
SETTINGS = (
    "parallel.dp_shard=-1", "train.steps=20000", "checkpoint.interval=0",
    "recovery.straggler_after_s=0.0", "recovery.straggler_speedup=1.05", "recovery.exclusion_cooldown_s=1.0",
)  # fmt: skip


REPLACED_XID = 64
"""A row of memory could not be remapped."""


def slow_run(tmp_path: Path, *more: str, options: Sequence[str] = (), mode: str = "exclude") -> LaunchedRun:
    """Three ranks share the batch; further ones are spares."""
    settings = (*SETTINGS, f"recovery.on_straggler={mode}", "train.global_batch_size=6", *more)
    return start(tmp_path, "elastic", faults=[SLOW], settings=settings, options=["--nproc-per-node", "3", *options])


class Exporter:
    """Answers as dcgm-exporter does, of one GPU whose last XID is `xid`."""

    def __init__(self, uuid: str) -> None:
        self.uuid, self.xid, self.num_answers = uuid, 0, 0
        self.url = ""

    def text(self) -> bytes:
        self.num_answers += 1
        return f'DCGM_FI_DEV_XID_ERRORS{{gpu="0",UUID="{self.uuid}"}} {self.xid}\n'.encode()


@contextmanager
def exporter(uuid: str) -> Iterator[Exporter]:
    made = Exporter(uuid)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(made.text())

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{server.server_address[1]}/metrics"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def give_gpu(run: LaunchedRun, attempt: int, rank: int, uuid: str) -> None:
    """Write what a rank on a GPU would have said of its device: these run on a CPU."""
    path = run.run.rank_dir(attempt, rank) / "events.jsonl"
    (identity, *_) = [event for event in read_events(path)[0] if event["kind"] == "rank"]
    with path.open("a") as file:
        file.write(json.dumps(identity | {"device_uuid": uuid, "wall_ns": identity["wall_ns"] + 1}) + "\n")


def stopped(run: LaunchedRun) -> LaunchedRun:
    run.process.send_signal(signal.SIGTERM)
    return run.finish(exit_code=None)


def wait_for_attempt(run: LaunchedRun, attempt: int) -> None:
    """Wait until an attempt has loaded what the one before saved."""
    wait_for(
        lambda: any(e["attempt"] == attempt for e in run.events("checkpoint", 0)), "a loaded checkpoint", run,
        DEADLINE_S,
    )  # fmt: skip


@pytest.mark.alone
def test_the_device_of_a_slow_rank_is_left_out(tmp_path: Path) -> None:
    run = slow_run(tmp_path)
    wait_for_attempt(run, 1)
    run = stopped(run)
    assert [event["world_size"] for event in run.events("attempt_started")] == [3, 2]
    (requested,) = run.events("exclusion_requested")
    assert (requested["ranks"], requested["mode"], requested["cause"]) == ([1], "exclude", "straggler")
    (excluded,) = run.events("excluded")
    assert (excluded["device"], excluded["excluded_rank"], excluded["cause"]) == ("slot 1", 1, "straggler")
    (saved,) = [e["checkpoint_step"] for e in run.events("preempted", 0) if e["attempt"] == 0]
    loaded = [e for e in run.events("checkpoint", 0) if e["attempt"] == 1 and e["state"] == "loaded"]
    assert [event["step"] for event in loaded] == [saved], "no step is lost"
    assert not run.events("rank_exit")
    (finding,) = run.findings("excluded")
    assert finding["evidence"]["excluded_for"] == "straggler"


@pytest.mark.alone
def test_a_slow_rank_is_replaced_by_a_spare_and_a_broken_device_left_out(tmp_path: Path) -> None:
    uuid, nodes = "GPU-broken", ["--nnodes", "2", "--rdzv-endpoint", f"localhost:{free_port()}", "--node-rank"]
    with exporter(uuid) as gpus:
        run = slow_run(tmp_path, f"probes.dcgm_url={gpus.url}", mode="replace", options=[*nodes, "0"])
        spare = start(tmp_path, "elastic", options=[*nodes, "1", "--nproc-per-node", "1"])
        wait_for_attempt(run, 1)
        give_gpu(run, attempt=1, rank=1, uuid=uuid)
        known = gpus.num_answers
        wait_for(lambda: gpus.num_answers > known + 2, "readings without an XID", run, DEADLINE_S)
        gpus.xid = REPLACED_XID
        wait_for_attempt(run, 2)
        run = stopped(run)
        spare.finish(exit_code=None)
    worlds = [(event["world_size"], event["ranks_left_over"]) for event in run.events("attempt_started")]
    assert worlds == [(3, 1), (3, 0), (2, 0)] * 2, "of both nodes"
    slow, broken = run.events("exclusion_requested")
    assert (slow["ranks"], slow["mode"], slow["cause"]) == ([1], "replace", "straggler")
    assert (broken["ranks"], broken["mode"], broken["cause"]) == ([1], "exclude", "xid")
    causes = [(e["excluded_rank"], e["cause"], e["attempt"]) for e in run.events("excluded")]
    assert causes == [(1, "straggler", 0), (1, "xid", 1)]
    assert not run.events("rank_exit"), "ranks save and leave: none dies"
    assert not run.findings("hang")


@pytest.mark.alone
def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    run = slow_run(tmp_path, "recovery.exclusion_dry_run=true")
    wait_for(lambda: run.events("exclusion_withheld"), "the record of the dry run", run, DEADLINE_S)
    (withheld,) = run.events("exclusion_withheld")
    assert withheld["dry_run"] is True
    assert "slot 1" in withheld["reason"]
    run = stopped(run)
    assert len(run.events("attempt_started")) == 1
    assert not run.events("excluded")
