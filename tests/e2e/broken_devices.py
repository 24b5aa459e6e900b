"""Devices that break while a run trains: an exporter that tells of their errors, and ranks that say they are theirs.

with exporter("GPU-a", "GPU-b") as gpus:
    run = start(..., settings=[f"probes.dcgm_url={gpus.url}"])
    give_gpu(run, attempt=0, rank=1, uuid="GPU-a")      # the ranks run on a CPU
    gpus.xids["GPU-a"] = REPLACED_XID
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from probes.tape.events import read_events
from tests.e2e.launched import LaunchedRun
from tests.waiting import wait_for

DEADLINE_S = 200.0
REPLACED_XID = 64
"""A row of memory could not be remapped."""


class Exporter:
    """Answers as dcgm-exporter does, with the last XID of each GPU."""

    def __init__(self, uuids: tuple[str, ...]) -> None:
        self.xids = dict.fromkeys(uuids, 0)
        self.num_answers = 0
        self.url = ""

    def text(self) -> bytes:
        self.num_answers += 1
        lines = [
            f'DCGM_FI_DEV_XID_ERRORS{{gpu="{number}",UUID="{uuid}"}} {xid}\n'
            for number, (uuid, xid) in enumerate(self.xids.items())
        ]
        return "".join(lines).encode()

    def break_device_of(self, run: LaunchedRun, attempt: int, rank: int, uuid: str) -> None:
        """An error of the device of a rank, once the watch has read that there was none."""
        give_gpu(run, attempt, rank, uuid)
        known = self.num_answers
        wait_for(lambda: self.num_answers > known + 2, "readings without an XID", run, DEADLINE_S)
        self.xids[uuid] = REPLACED_XID


@contextmanager
def exporter(*uuids: str) -> Iterator[Exporter]:
    made = Exporter(uuids)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(made.text())

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{server.server_address[1]}/metrics"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
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
