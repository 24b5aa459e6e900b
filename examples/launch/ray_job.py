"""Run `rankscope train` on the nodes of a Ray cluster: one launcher per node, with all GPUs of that node.

    ray job submit --working-dir . -- python ray_job.py train.toml --job gpt-1 --nodes 2 --ranks 8

The runs of a job are in the folder `--runs`/`--job`, which must be on shared storage. A job that is submitted again
under the same name resumes from its newest run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

PORT = 29500


@ray.remote(max_retries=0)
def address() -> str:
    return ray.util.get_node_ip_address()


@ray.remote(max_retries=0)
def launch(arguments: list[str]) -> int:
    return subprocess.run([sys.executable, "-m", "rankscope", "train", *arguments], check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--job", required=True)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=8, help="ranks per node")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs per node")
    parser.add_argument("--runs", type=Path, default=Path("/runs"))
    options = parser.parse_args()
    ray.init(ignore_reinit_error=True)
    group = placement_group([{"CPU": 1, "GPU": options.gpus}] * options.nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    on_node = [
        {
            "num_cpus": 1,
            "num_gpus": options.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
        }
        for node in range(options.nodes)
    ]
    head = ray.get(address.options(**on_node[0]).remote())
    runs = options.runs / options.job
    if (runs / "latest").exists():
        arguments = ["--resume", str(runs / "latest")]
    else:
        arguments = [options.config, "--set", f"run.dir={runs}"]
    arguments += ["--nnodes", str(options.nodes), "--nproc-per-node", str(options.ranks)]
    arguments += ["--rdzv-endpoint", f"{head}:{PORT}"]
    codes = ray.get(
        [
            launch.options(**on_node[node]).remote([*arguments, "--node-rank", str(node)])
            for node in range(options.nodes)
        ]
    )
    return next((code for code in codes if code), 0)  # negative for a launcher that was killed


if __name__ == "__main__":
    sys.exit(main())
