"""`rankscope dumps`: what torch's own debug server says of a job that hangs now, and what anybody else may answer."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from analyzers.evidence.diagnose_files import diagnose_files
from rankscope.cli import app
from store.readers.dumps import debug_server
from store.readers.dumps.debug_server import DebugServerError, fetch_dumps
from tests.e2e.launched import rankscope
from tests.forked import ForkedPython
from tests.ports import free_port
from tests.rankscope.test_json_schema import checked
from tests.support.simulator.recorder_dumps import START_NS, Job
from tests.waiting import wait_for

HANGS = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.distributed.debug import start_debug_server

if __name__ == "__main__":
    dist.init_process_group("gloo")
    start_debug_server(port=int(sys.argv[1]))
    numbers = torch.ones(8)
    for _ in range(4):
        dist.all_reduce(numbers)
    print("ready", os.getpid(), flush=True)
    if dist.get_rank() == 1:
        time.sleep(600)  # never comes to the fifth
    dist.all_reduce(numbers)
"""
PAGE = """<section class="content"><h1>FlightRecorder</h1>
<h2>Rank 0: http://a:1/handler/fr_trace_json?</h2> <pre>{"version": "2.10", "entries": []}</pre>
<h2>Rank 1: http://b:1/handler/fr_trace_json?</h2> <p>Failed to fetch: status=408</p> <pre>Timeout: b</pre>
<h2>Rank 2: <script>alert(1)</script></h2> <pre>{"entries": "none"}</pre>
</section>"""


def test_a_job_that_hangs_now(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    port, master_port = free_port(), free_port()
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environment = os.environ | {"TORCH_FR_BUFFER_SIZE": "100"}
    with (tmp_path / "log").open("wb") as log:
        command = [*torchrun, "--master-port", str(master_port), "hangs.py", str(port)]
        options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "start_new_session": True}
        job = ForkedPython(command, forks_python=True, stdout=log, stderr=log, **options)
    try:
        said = tmp_path / "log"
        wait_for(lambda: said.read_bytes().count(b"ready") == 2, "both ranks in front of the fifth call")
        folder = tmp_path / "dumps"

        def verdict() -> str:
            done = rankscope("dumps", f"localhost:{port}", "--into", str(folder))
            if done.returncode:  # the server does not listen yet, or a rank did not answer in time
                print(done.stderr)
                return ""
            return " ".join(rankscope("analyze", str(folder)).stdout.split())

        text = "Rank 1 did not reach all_reduce #5 (group world:0-1)"
        wait_for(lambda: text in verdict(), text)  # a rank is silent for five seconds before anybody is accused
    finally:
        workers = re.findall(rb"ready (\d+)", (tmp_path / "log").read_bytes())
        for leader in (job.pid, *map(int, workers)):  # torchrun gives each worker a session of its own
            with suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)
        job.wait()


@contextmanager
def answering(status: int, body: bytes, **headers: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_ranks_that_do_not_answer_are_named(tmp_path: Path) -> None:
    with answering(200, PAGE.encode()) as address:
        fetched = fetch_dumps(address, tmp_path / "dumps")
    assert fetched.ranks == [0]
    assert fetched.silent[1] == "Timeout: b"
    assert [path.name for path in (tmp_path / "dumps").iterdir()] == ["rank_0.json"]


def test_the_command_names_them_as_json(tmp_path: Path) -> None:
    with answering(200, PAGE.encode()) as address:
        words = ["dumps", address, "--into", str(tmp_path / "dumps"), "--format", "json"]
        done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 1, done.output
    checked("dumps", told := json.loads(done.stdout))
    assert (told["ranks"], told["silent"]) == ([0], {"1": "Timeout: b"})


@pytest.mark.parametrize(
    ("status", "body", "headers", "said"),
    [
        (404, b"", {}, "/fr_trace_nccl_json answered 404: is it torch's debug server?"),
        (302, b"", {"Location": "file:///etc/passwd"}, "answered 302"),
        (200, b"", {}, "its page lists no rank"),
        (200, b"\xff\x00<h2>Rank 0: x</h2><pre>" + b"[" * 100_000, {}, "an empty answer"),
        (200, b"<h2>Rank 0: x</h2><pre>" + b"[" * 100_000 + b"</pre>", {}, "[[["),
        (200, b"<h2>Rank 0: x</h2><pre>[1, 2]</pre>", {}, "[1, 2]"),
        (200, b"x" * 2_000, {}, "larger than"),
    ],
)
def test_what_is_no_debug_server(
    status: int, body: bytes, headers: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if said == "larger than":
        monkeypatch.setattr(debug_server, "MAX_PAGE_BYTES", 1_000)
    with answering(status, body, **headers) as address, pytest.raises(DebugServerError) as error:
        fetch_dumps(address, tmp_path / "dumps")
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "dumps").exists()


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    for address, said in (
        (f"http://127.0.0.1:{free_port()}", "no answer"),
        ("file:///etc/passwd", "must be the debug server's address"),
        ("http://", "must be the debug server's address"),
    ):
        done = rankscope("dumps", address, "--into", str(tmp_path / "dumps"))
        assert done.returncode == 2
        assert said in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_a_saved_page_is_read_as_the_dumps_of_its_ranks(tmp_path: Path) -> None:
    job = Job(3)
    job.steps(4)
    job.collective("all_reduce", ranks=[0, 2])
    ranks = "".join(
        f"<h2>Rank {rank}: http://a:1/handler/fr_trace_json?</h2> <pre>{json.dumps(job.dump(rank))}</pre>"
        for rank in range(3)
    )
    page = tmp_path / "saved page.html"
    page.write_text(f'<section class="content"><h1>FlightRecorder</h1>{ranks}<h2>Rank 3: http://a:1/h</h2></section>')
    os.utime(page, (START_NS / 1e9 + 600, START_NS / 1e9 + 600))
    diagnosis = diagnose_files([page])
    assert (diagnosis.fired[0].ranks, diagnosis.fired[0].cause) == ((1,), "not_entered")
    assert diagnosis.run["files_read"] == {"flight-recorder dump": 3}
    assert diagnosis.run["file_problems"] == [
        {"path": "rank 3 of saved page.html", "problem": "has no dump: an empty answer"}
    ]
