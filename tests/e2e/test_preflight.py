"""`rankscope preflight` with real processes: four ranks of one machine, and eight nodes with a network of their own.

The nodes are network namespaces whose links are limited. One link has a fifth of the others' rate; on one node two busy
processes share the core; one process reports another torch version, and one a clock that is three seconds ahead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.namespaces import INTERFACE, Network, why_not
from tests.ports import free_port
from trainer.preflight.report import EXIT_FAILED, EXIT_PASSED

ROOT = Path(__file__).parents[2]
NUM_NODES = 8
RATE_MBIT = 200
SLOW_LINK, TAKEN_CORE, OTHER_TORCH, WRONG_CLOCK = 2, 4, 5, 6
ALTERED_TORCH = """
import importlib.abc, importlib.machinery, sys
class Altered(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch.version":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def altered(module):
            run(module)
            module.__version__ = "2.12.1"
        spec.loader.exec_module = altered
        return spec
sys.meta_path.insert(0, Altered())
"""
SHIFTED_CLOCK = """
import time
own_ns, own = time.time_ns, time.time
time.time_ns = lambda: own_ns() + 3_000_000_000
time.time = lambda: own() + 3.0
"""


def environment(**more: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if name not in ("GLOO_SOCKET_IFNAME", "RANK")}
    return {**ours, "OMP_NUM_THREADS": "1", "RANKSCOPE_FAIL_LOUD": "1", **more}


def bad(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {line["check"]: line for line in report["lines"] if line["status"] != "pass"}


@pytest.mark.parametrize(("launcher", "num_ranks"), [("torch.distributed.run", 4), ("rankscope", 2)])
def test_ranks_of_one_machine(tmp_path: Path, launcher: str, num_ranks: int) -> None:
    words = ["--standalone"] if launcher == "torch.distributed.run" else ["run", "--run-dir", str(tmp_path / "run")]
    words += ["--nproc-per-node", str(num_ranks), "-m", "rankscope", "preflight"]
    done = subprocess.run(
        [sys.executable, "-m", launcher, *words, "--json", "--runs", str(tmp_path), "--env", "PREFLIGHT_TOKEN"],
        cwd=ROOT, env=environment(PREFLIGHT_TOKEN="a-secret-of-mine"), capture_output=True, text=True, check=False,
    )  # fmt: skip
    report = json.loads(done.stdout[done.stdout.index("{") :])
    failed = {check for check, line in bad(report).items() if line["status"] == "fail"}
    assert failed <= {"links"}, "on a crowded machine one link is truly far slower than the others"
    assert done.returncode == (EXIT_FAILED if failed else EXIT_PASSED), done.stderr
    readings = report["readings"]
    assert [reading["rank"] for reading in readings["ranks"]] == [*range(num_ranks)]
    assert {(link["source"], link["target"]) for link in readings["links"]} == {
        (a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b
    }
    assert all(link["bytes_per_s"] > 1e6 and 0 < link["latency_s"] < 10 for link in readings["links"])
    assert readings["all_reduce"]["bus_bytes_per_s"] > 1e6
    measured = [reading["rank"] for reading in readings["ranks"] if reading["matmul_flops_per_s"]]
    assert measured == [0], "the processor is measured once a node"
    assert not {"ranks", "versions", "settings", "all-reduce"} & set(bad(report))
    assert readings["ranks"][0]["settings"]["PREFLIGHT_TOKEN"] == "(redacted)"


def test_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, "-m", "rankscope", "preflight", "--timeout", "2", "--json", "--runs", str(tmp_path)],
        cwd=ROOT, env=environment(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", **master), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert bad(json.loads(done.stdout))["ranks"]["text"] == "Rank 1 of 2 did not answer."


def limit(network: Network, node: int, mbit: float) -> None:
    """Limit what a node sends."""
    subprocess.run(
        ["tc", "-n", network.name(node), "qdisc", "add", "dev", INTERFACE, "root", "tbf",
         "rate", f"{mbit}mbit", "burst", "64kb", "latency", "50ms"],
        check=True,
    )  # fmt: skip


@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one node needs a core of its own")
def test_four_faults_of_eight_nodes_are_named(tmp_path: Path) -> None:
    for node, program in ((OTHER_TORCH, ALTERED_TORCH), (WRONG_CLOCK, SHIFTED_CLOCK)):
        folder = tmp_path / f"site-{node}"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(program)
    common, own = sorted(os.sched_getaffinity(0))[:2]
    with Network(NUM_NODES) as network:
        for node in network.nodes:
            limit(network, node, RATE_MBIT / 5 if node == SLOW_LINK else RATE_MBIT)
        processes: list[subprocess.Popen[str]] = []
        for node in network.nodes:
            core = own if node == TAKEN_CORE else common
            processes.append(
                subprocess.Popen(
                    [
                        *network.on(node),
                        "unshare",
                        "--uts",
                        "sh",
                        "-c",
                        f'hostname node-{node} && exec taskset -c {core} "$@"',
                        "sh",
                        sys.executable,
                        "-m",
                        "rankscope",
                        "preflight",
                        "--json",
                        "--runs",
                        str(tmp_path),
                    ],
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=environment(
                        RANK=str(node),
                        WORLD_SIZE=str(NUM_NODES),
                        LOCAL_RANK="0",
                        MASTER_ADDR=network.address(0),
                        MASTER_PORT="29500",
                        PYTHONPATH=str(tmp_path / f"site-{node}"),
                    ),
                )
            )
        loop = ["taskset", "-c", str(own), "sh", "-c", "while :; do :; done"]
        busy = [subprocess.Popen(loop, text=True) for _ in range(2)]
        try:
            output, errors = processes[0].communicate(timeout=240)
            codes = [process.wait(timeout=30) for process in processes]
        finally:
            for process in (*processes, *busy):
                process.kill()
                process.communicate()
    assert codes == [1] * NUM_NODES, errors
    report = json.loads(output)
    found = bad(report)
    checks = ("versions", "clocks", "links", "matrix products")
    # Less than a quarter under the others is a warning, and true of a processor whose clock changes.
    failed = [line for line in report["lines"] if line["status"] == "fail" and line["check"] in checks]
    nodes = {check: [node for line in failed if line["check"] == check for node in line["nodes"]] for check in checks}
    assert nodes == {
        "versions": [f"node-{OTHER_TORCH}"],
        "clocks": [f"node-{WRONG_CLOCK}"],
        "links": [f"node-{SLOW_LINK}"],
        "matrix products": [f"node-{TAKEN_CORE}"],
    }, report["lines"]
    assert found["versions"]["text"].startswith(f"torch is 2.12.1 on node-{OTHER_TORCH}, and ")
    assert found["clocks"]["text"] == f"The clock of node-{WRONG_CLOCK} is 3 s ahead of the others."
    assert " sends at most " in found["links"]["text"]
    assert set(found) <= {*nodes, "cores", "memory", "disk"}, "nobody else is accused"
    assert report["readings"]["duration_s"] <= 30
