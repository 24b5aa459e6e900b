"""Cost of a `/metrics` scrape, for 8 to 1,024 ranks: measuring in watch's tick, and answering.

    python -m benchmarks.cost.scrape
    python -m benchmarks.cost.scrape --ranks 8 1024 --steps 1000 --json scrape.json
    python -m benchmarks.cost.scrape --training 6  # effect of all exporters on the step time
    python -m benchmarks.cost.scrape --training 6 --beside scraped dead

A store with `--steps` steps per rank is made as in `benchmarks.scale.ranks`. "Measured" is `NodeMetrics.measure` with
the time account of the whole run (every 15 s) and without it (each tick while a scraper is active); "answered" is one
GET over loopback. Each is the median of `--times`.

`--training` measures the ratio of step times (the demo's model, four ranks) with and without an exporter, alternating;
it prints the median, minimum and maximum over the pairs:

* scraped: blocks of 10 s within one run; in half of them /metrics is scraped every second,
* dead: whole runs with and without an OTLP endpoint that refuses connections (all spans of all ranks),
* slow: the same with an endpoint that takes five seconds per answer,
* trackers: whole runs with and without TensorBoard and W&B (offline).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.harness import argument_parser, write_json
from benchmarks.scale.ranks import make_steps
from probes.tape.rundir import RunDir
from store import Store, StoreError
from watch.exporting.metrics.node_metrics import NodeMetrics
from watch.exporting.prometheus.server import Listen, Snapshot, serve

BLOCK_S = 10.0
SLOW_S = 5.0
EXPORTERS = ("scraped", "dead", "slow", "trackers")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 128, 1024])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--times", type=int, default=9)
    parser.add_argument("--training", type=int, default=0, metavar="BLOCKS", help="pairs of blocks in a training run")
    parser.add_argument("--beside", nargs="+", choices=EXPORTERS, default=EXPORTERS, help="exporters to measure")
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {"scrape": [], "training": {}}
    if options.training:
        for what in options.beside:
            found["training"][what] = training(what, options.training)
    else:
        print(f"{'ranks':>6} {'series':>7} {'kB':>6}   measured, whole / tick (ms)   answered (ms)")
        for ranks in options.ranks:
            row = scraped(ranks, options.steps, options.times)
            found["scrape"].append(row)
            print(
                f"{ranks:6d} {row['series']:7d} {row['bytes'] / 1e3:6.0f}   "
                f"{row['whole_ms']:10.1f} / {row['tick_ms']:<15.1f} {row['answer_ms']:10.1f}",
                flush=True,
            )
    write_json(options.json, found)
    return 0


def scraped(ranks: int, steps: int, times: int) -> dict[str, Any]:
    """Number of series, bytes and milliseconds of a scrape with this number of ranks."""
    with tempfile.TemporaryDirectory(prefix="scrape-") as folder:
        path = Path(folder) / "run"
        make_steps(path, ranks, steps)
        run = RunDir.open(path)
        with Store.open(run, catch_up=False) as store:
            whole = [
                _ms(lambda: NodeMetrics(run.manifest(), node_rank=0).measure(store, time.time_ns()))
                for _ in range(times)
            ]
            metrics = NodeMetrics(run.manifest(), node_rank=0)
            samples = metrics.measure(store, time.time_ns())
            tick = [_ms(lambda: metrics.measure(store, time.time_ns())) for _ in range(times)]
        snapshot = Snapshot(metrics.common)
        snapshot.replace(samples)
        with serve(snapshot, Listen()) as endpoint:
            text = _get(endpoint.url)
            answer = [_ms(lambda: _get(endpoint.url)) for _ in range(times)]
    return {
        "ranks": ranks,
        "steps": steps,
        "series": len(samples),
        "bytes": len(text),
        "whole_ms": statistics.median(whole),
        "tick_ms": statistics.median(tick),
        "answer_ms": statistics.median(answer),
    }


def _ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as answer:
        body: bytes = answer.read()
    return body


def training(what: str, pairs: int) -> dict[str, Any]:
    """Measure the ratio of step times with and without an exporter, in blocks of one run or in alternating runs."""
    with tempfile.TemporaryDirectory(prefix="scrape-") as folder:
        ratios = _scraped_in_turns(Path(folder), pairs) if what == "scraped" else _runs_in_turns(what, folder, pairs)
    middle = statistics.median(ratios)
    print(f"{what}: {middle:.3f} of the step time without (pairs {min(ratios):.3f} to {max(ratios):.3f})", flush=True)
    return {"ratio": middle, "pairs": ratios}


def _launch(runs: Path, steps: int, *more: str, **environment: str) -> subprocess.Popen[bytes]:
    settings = [f"run.dir={runs}", f"train.steps={steps}", "otel.group=all", "otel.ranks=all_ranks", *more]
    options = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "rankscope", "train", "examples/gpt-demo.toml", *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, **environment})


def _scraped_in_turns(folder: Path, pairs: int) -> list[float]:
    process = _launch(folder / "runs", 100_000)
    try:
        return _in_turns(folder / "runs", pairs)
    finally:
        process.terminate()
        process.wait(60)


def _runs_in_turns(what: str, folder: str, pairs: int) -> list[float]:
    """Pairs of whole runs with and without the exporter, in alternating order."""
    ratios = []
    with _endpoint(what) as url:
        more = ["trackers.to=['tensorboard', 'wandb']"] if what == "trackers" else []
        environment = {"WANDB_MODE": "offline"} if what == "trackers" else {"OTEL_EXPORTER_OTLP_ENDPOINT": url}
        for pair in range(pairs):
            took = {}
            for is_on in (pair % 2 == 0, pair % 2 == 1):
                runs = Path(folder) / f"{pair}-{is_on}"
                if _launch(runs, 150, *(more if is_on else []), **(environment if is_on else {})).wait(300):
                    raise SystemExit("a run failed")
                with Store.open(RunDir.open(runs / "latest")) as store:
                    ((took[is_on],),) = store.rows("SELECT median(duration_ns) FROM steps WHERE step > 20")
            ratios.append(took[True] / took[False])
    return ratios


@contextmanager
def _endpoint(what: str) -> Iterator[str]:
    """An address that refuses connections, or one that answers late."""

    class SlowHandler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(SLOW_S)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), SlowHandler)
    server.daemon_threads = True
    url = f"http://127.0.0.1:{server.server_port}"
    if what == "slow":
        threading.Thread(target=server.serve_forever, daemon=True).start()
    else:
        server.server_close()
    try:
        yield url
    finally:
        if what == "slow":
            server.shutdown()
            server.server_close()


def _in_turns(runs: Path, pairs: int) -> list[float]:
    deadline = time.monotonic() + 60
    while not (runs / "targets.json").exists() or not json.loads((runs / "targets.json").read_text()):
        if time.monotonic() > deadline:
            raise SystemExit("the run did not come up")
        time.sleep(0.2)
    (target,) = json.loads((runs / "targets.json").read_text())
    url = f"http://{target['targets'][0]}/metrics"
    run = RunDir.open(runs / "latest")
    while _newest(run) is None:
        if time.monotonic() > deadline + 120:
            raise SystemExit("the run did not begin to train")
        time.sleep(1)
    time.sleep(5)  # past its first steps
    bounds: list[tuple[bool, int, int]] = []
    for block in range(2 * pairs):
        is_on = (block + block // 2) % 2 == 0  # on off off on, so that a drift affects both
        start = time.time_ns()
        stop = threading.Event()
        scraper = threading.Thread(target=_scrape, args=(url, stop), daemon=True)
        if is_on:
            scraper.start()
        time.sleep(BLOCK_S)
        stop.set()
        bounds.append((is_on, start, time.time_ns()))
    while (_newest(run) or 0) < bounds[-1][2]:  # wait until the store has all of it
        time.sleep(0.5)
    with Store.open(run) as store:
        medians = [
            (
                is_on,
                store.rows("SELECT median(duration_ns) FROM steps WHERE start_ns BETWEEN ? AND ?", [first, last])[0][0],
            )
            for is_on, first, last in bounds
        ]
    both = [pair for pair in zip(medians[::2], medians[1::2], strict=True) if pair[0][1] and pair[1][1]]
    if not both:
        raise SystemExit("no pair of blocks has steps: the machine is too busy")
    return [(a[1] / b[1]) if a[0] else (b[1] / a[1]) for a, b in both]


def _newest(run: RunDir) -> int | None:
    """Start time of the newest step in the store."""
    try:
        with Store.open(run, catch_up=False) as store:
            ((newest,),) = store.rows("SELECT max(start_ns) FROM steps WHERE duration_ns IS NOT NULL")
    except StoreError:
        return None
    return None if newest is None else int(newest)


def _scrape(url: str, stop: threading.Event) -> None:
    while not stop.wait(1.0):
        _get(url)


if __name__ == "__main__":
    sys.exit(main())
