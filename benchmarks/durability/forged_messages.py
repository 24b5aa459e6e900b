"""Forged, replayed, truncated, oversized and slow messages to all endpoints of a live job.

    python -m benchmarks.durability.forged_messages                  # 290 messages, some two minutes
    python -m benchmarks.durability.forged_messages --rounds 10

A job of two nodes trains (two launchers on this machine, with a secret), its dashboard is served, and an attacker on
the machine sends:

- to the launcher's store: digests, verdicts, clocks and leaders with another key, another session, replayed, truncated,
  with a flipped bit, of 7 MB (torch accepts up to 8); and bytes that are not a request to torch's store;
- to `/metrics` and the dashboard: requests that are truncated, 1 MB long, never end, are slow, or have a foreign Host
  or Origin;
- to the folder of a node: unreadable profiling requests.

Afterwards the job must still train in the same attempt, both watches, the metrics and the pages must answer, no rank
may have been killed or profiled, and no process may have grown by MAX_GROWTH_BYTES or more. Exit code 1 otherwise.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

from analyzers.run.calls.snapshot import AttemptView, RankView
from analyzers.run.live.digest import Digest, encode
from benchmarks.harness import argument_parser, markdown_head, markdown_row, write_json
from dashboard.launch import DashboardServer
from probes.profiling.request import NAME
from store import Store
from tests.e2e.launched import LaunchedRun, start
from tests.ports import free_port
from tests.waiting import wait_for
from watch.digests.link import ALL, LEADER_KEY, PERIOD_S, digest_key, verdict_key
from watch.digests.signed_messages import NO_SESSION, Signer

MAX_GROWTH_BYTES = 64 << 20
"""Allowed growth of a process during training, including caches."""
KEYS = (digest_key(1), verdict_key(1), LEADER_KEY, "rankscope/clock/1")
_KILL = b'{"attempt": 0, "ranks": [0, 1], "summary": "forged"}'


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--rounds", type=int, default=50, help="messages to each key of the store")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    dice, sent = random.Random(options.seed), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="forged-") as folder, _job(Path(folder)) as (first, second, ports):
        before = _memory(first)
        with DashboardServer(first.runs_dir, port=0) as pages, _slow_clients(ports["metrics"], sent):
            pages_port = int(pages.url.rpartition(":")[2])
            _store(ports["store"], options.rounds, dice, sent)
            _raw(ports["store"], dice, sent)
            _http(ports["metrics"], "metrics", dice, sent)
            with _slow_clients(pages_port, sent):
                _http(pages_port, "pages", dice, sent)
            _requests(first, dice, sent)
            problems = _problems(first, second, ports["metrics"], pages.url, before)
        refused = sum(event["num_messages"] for event in first.events("message_refused"))
        for one in (first, second):
            one.process.terminate()
        for one in (first, second):
            one.finish(exit_code=None)
    print(markdown_head("to", "messages"))
    for name, count in sent.items():
        print(markdown_row(name, count))
    print(f"\n{sent.total()} messages, {refused} reported as refused so far, {len(problems)} problems")
    for problem in problems:
        print(f"- {problem}")
    write_json(options.json, {"sent": dict(sent), "refused": refused, "problems": problems})
    return 1 if problems else 0


@contextlib.contextmanager
def _job(folder: Path) -> Iterator[tuple[LaunchedRun, LaunchedRun, dict[str, int]]]:
    """Start two nodes that train; yield their launchers and the ports."""
    ports = {"store": free_port(), "metrics": free_port()}
    listen = f"metrics.listen=127.0.0.1:{ports['metrics']}"
    settings = ["parallel.dp_shard=2", "train.steps=100000", "checkpoint.interval=0", listen]
    paced = [f"slow_data@step={step},until={step + 99},rank=0,seconds=0.1" for step in range(1, 4000, 100)]

    def node(rank: int) -> LaunchedRun:
        where = ["--nnodes", "2", "--node-rank", str(rank), "--rdzv-endpoint", f"127.0.0.1:{ports['store']}"]
        return start(folder, "elastic", settings=settings, options=[*where, "--nproc-per-node", "1"], faults=paced)

    first = node(0)
    wait_for(lambda: (first.runs_dir / "latest").exists(), "the run", first)
    second = node(1)
    try:
        wait_for(lambda: _steps(first) > 5 and first.events("clock_offset"), "steps and digests", first)
        yield first, second, ports
    finally:
        for one in (second, first):
            if not one.has_ended():
                one.kill_all()


def _store(port: int, rounds: int, dice: random.Random, sent: Counter[str]) -> None:
    """Overwrite the messages of both nodes as often as they are read."""
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
    recorded = {key: bytes(store.get(key)) for key in KEYS if store.check([key])}
    view = AttemptView(attempt=0, ranks={1: RankView(rank=1, step=99_999, last_ns=time.time_ns())})
    digest = encode(Digest(node=1, sent_ns=time.time_ns(), view=view))
    stranger = Signer(b"a guess", node=1)
    for turn in range(rounds):
        for key in KEYS:
            body = _KILL if key == verdict_key(1) else digest
            real = recorded.get(key, body)
            at = dice.randrange(len(real))
            store.set(key, (
                stranger.seal("digest", body, to=ALL if key == LEADER_KEY else 0, echo=NO_SESSION),
                body,
                real,
                real[:at],
                real[:at] + bytes((real[at] ^ 1,)) + real[at + 1 :],
                dice.randbytes(200),
                real + bytes(7 << 20),
                b"",
            )[turn % 8])  # fmt: skip
            sent["store"] += 1
        time.sleep(1.1 * PERIOD_S)


def _raw(port: int, dice: random.Random, sent: Counter[str]) -> None:
    """Send bytes that are not a store request to the launcher's store."""
    for turn in range(30):
        data = (dice.randbytes(64), b"\x00" * 9 + b"\xff" * 16, b"GET / HTTP/1.1\r\n\r\n", bytes((turn,)), b"")[
            turn % 5
        ]
        with socket.create_connection(("127.0.0.1", port), 10) as connection, contextlib.suppress(OSError):
            connection.sendall(data)
        sent["store, no request"] += 1


def _http(port: int, name: str, dice: random.Random, sent: Counter[str]) -> None:
    host = f"127.0.0.1:{port}".encode()
    for request in (
        b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: " + host + b"\r\nOrigin: http://evil.example\r\n\r\n",
        b"GET /_stcore/stream HTTP/1.1\r\nHost: "
        + host
        + b"\r\nOrigin: http://127.0.0.1:1\r\nUpgrade: websocket\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: " + host,
        b"GET /" + b"a" * (1 << 20),
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 100_000,
        b"POST / HTTP/1.1\r\nHost: " + host + b"\r\nContent-Length: 99999999999\r\n\r\nx",
        b"GET /../../../../etc/passwd HTTP/1.1\r\nHost: " + host + b"\r\n\r\n",
        b"\x16\x03\x01" + dice.randbytes(60),
        dice.randbytes(5000),
    ) * 2:
        with socket.create_connection(("127.0.0.1", port), 10) as connection, contextlib.suppress(OSError):
            connection.settimeout(0.3)
            connection.sendall(request)
            connection.recv(1 << 16)
        sent[name] += 1


@contextlib.contextmanager
def _slow_clients(port: int, sent: Counter[str]) -> Iterator[None]:
    """Open connections that begin a request and send nothing more."""
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 10)).sendall(b"GET /met")
            sent["slow"] += 1
        yield


def _requests(first: LaunchedRun, dice: random.Random, sent: Counter[str]) -> None:
    path = first.run.node_dir(0) / NAME
    other = b'{"number": 1, "attempt": 7, "ranks": [0], "first_step": 1, "num_steps": 9, "reason": ""}'
    broken = (b"", b"{", b"[]", dice.randbytes(900), b"{" * 100_000, bytes(4 << 20), b'{"number": 1e999}')
    for data in (*broken, other) * 2:
        path.with_suffix(".new").write_bytes(data)
        path.with_suffix(".new").replace(path)
        sent["requests to profile"] += 1
        time.sleep(0.3)


def _problems(first: LaunchedRun, second: LaunchedRun, metrics: int, pages: str, before: dict[str, int]) -> list[str]:
    found = [f"launcher {n} ended" for n, one in enumerate((first, second)) if one.has_ended()]
    seen = _steps(first)
    wait_for(lambda: _steps(first) > seen + 10, "ten more steps", first)
    kinds = ("culprit_killed", "rank_exit", "stale_killed", "watch_replaced", "profile_captured", "analyzer_failed")
    found += [f"{len(events)} events {kind}" for kind in kinds if (events := first.events(kind))]
    attempts = {event["attempt"] for event in first.events("attempt_started")}
    found += [f"attempts {sorted(attempts)}"] if attempts != {0} else []
    found += ["nothing was reported as refused"] if not first.events("message_refused") else []
    for url in (f"http://127.0.0.1:{metrics}/metrics", f"{pages}/_stcore/health"):
        with urllib.request.urlopen(url, timeout=60) as answer:
            found += [f"{url}: {answer.status}"] if answer.status != 200 else []
    after = _memory(first)
    found += [f"{name} is gone" for name in before if name not in after]
    for name, size in after.items():
        if size - before.get(name, size) > MAX_GROWTH_BYTES:
            found.append(f"{name} grew by {(size - before[name]) >> 20} MiB")
    return found


def _memory(first: LaunchedRun) -> dict[str, int]:
    """Resident bytes of ranks and watches, by name and process id."""
    pids = {f"rank {rank}": pid for rank, pid in first.pids().items()} | {"launcher of node 0": first.process.pid}
    pids |= {f"watch {event['pid']}": event["pid"] for event in first.events("watch_started")}
    found = {}
    for name, pid in pids.items():
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            found[name] = pages * os.sysconf("SC_PAGE_SIZE")
    return found


def _steps(first: LaunchedRun) -> int:
    with contextlib.suppress(Exception), Store.open(first.run) as store:
        return int(store.rows("SELECT count(*) FROM steps WHERE rank = 0")[0][0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
