"""`rankscope train` on the nodes of a Ray cluster: one launcher a node, each with all of its GPUs.

    ray job submit --working-dir . -- python ray_job.py train.toml --job gpt-1 --nodes 2 --ranks 8

The runs of a job are in the folder of its name, on storage that all nodes share: a job that is submitted again goes on
there, a new job needs a new name.
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
def launch(words: list[str]) -> int:
    return subprocess.run([sys.executable, "-m", "rankscope", "train", *words], check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--job", required=True)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=8, help="ranks a node")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs a node")
    parser.add_argument("--runs", type=Path, default=Path("/runs"))
    asked = parser.parse_args()
    ray.init(ignore_reinit_error=True)
    group = placement_group([{"CPU": 1, "GPU": asked.gpus}] * asked.nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    places = [
        {
            "num_cpus": 1,
            "num_gpus": asked.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
        }
        for node in range(asked.nodes)
    ]
    head = ray.get(address.options(**places[0]).remote())
    runs = asked.runs / asked.job
    what = (
        ["--resume", str(runs / "latest")] if (runs / "latest").exists() else [asked.config, "--set", f"run.dir={runs}"]
    )
    where = ["--nnodes", str(asked.nodes), "--nproc-per-node", str(asked.ranks), "--rdzv-endpoint", f"{head}:{PORT}"]
    codes = ray.get(
        [
            launch.options(**places[node]).remote([*what, *where, "--node-rank", str(node)])
            for node in range(asked.nodes)
        ]
    )
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
