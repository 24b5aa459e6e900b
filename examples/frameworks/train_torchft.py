"""torchft with one rank per replica group, and its lighthouse in rank 0.

rankscope run --nproc-per-node 2 examples/frameworks/train_torchft.py
rankscope analyze runs/latest
"""

from __future__ import annotations

import argparse
import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shared = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if rank == 0:
        lighthouse = LighthouseServer(bind="[::]:0", min_replicas=ranks, join_timeout_ms=10_000)
        shared.set("lighthouse", lighthouse.address())
    # each replica group has a store; here it consists of one rank
    store = dist.TCPStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    inner = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)), load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=ranks, rank=0, world_size=1, replica_id=f"replica-{rank}",
        store_addr=socket.gethostname(), store_port=store.port,
        lighthouse_addr=shared.get("lighthouse").decode(),
    )  # fmt: skip
    model = DistributedDataParallel(manager, net)
    optimizer = Optimizer(manager, inner)
    for _ in range(args.steps):
        x = torch.randn(16, 32)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
    manager.shutdown()
    shared.set(f"done-{rank}", "")
    if rank == 0:  # the others need the lighthouse until they are done
        shared.wait([f"done-{other}" for other in range(ranks)], timedelta(seconds=60))
        lighthouse.shutdown()


if __name__ == "__main__":
    main()
