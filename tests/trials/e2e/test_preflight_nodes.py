"""`rankscope preflight` on eight nodes with a network of their own, four of which have a fault.

The nodes are network namespaces whose links are limited. One link has a fifth of the others' rate; on one node two busy
processes share the core; one process reports another torch version, and one a clock that is three seconds ahead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.namespaces import INTERFACE, Network, why_not
from tests.e2e.preflight_runs import ROOT, bad, environment

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


def limit(network: Network, node: int, mbit: float) -> None:
    """Limit what a node sends."""
    subprocess.run(
        ["tc", "-n", network.name(node), "qdisc", "add", "dev", INTERFACE, "root", "tbf",
         "rate", f"{mbit}mbit", "burst", "64kb", "latency", "50ms"],
        check=True,
    )  # fmt: skip


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
                        "--format",
                        "json",
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
