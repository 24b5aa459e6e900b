"""Former crashes and wrong records, each tried in separate processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.gpu.check import Check, Place, Result, failed, not_here, passed, run_script

__all__ = ["CHECKS"]

_MESH = """
from torch.distributed.device_mesh import init_device_mesh
start()
world = dist.get_world_size()
mesh = init_device_mesh(DEVICE.type, (1, world), mesh_dim_names=("a", "b"))
for name in ("a", "b"):
    dist.all_reduce(torch.ones(4, device=DEVICE), group=mesh.get_group(name))
if ON_GPU:
    part = dist.split_group(split_ranks=[list(range(world))])
    dist.all_reduce(torch.ones(4, device=DEVICE), group=part)
del mesh  # gloo aborts in every second exit if it still holds the groups, without Rankscope, too
dist.destroy_process_group()
"""
_BATCHED = """
start()
rank, world = dist.get_rank(), dist.get_world_size()
if ON_GPU:
    assert type(dist.group.WORLD) is dist.distributed_c10d.ProcessGroup, type(dist.group.WORLD)
into = torch.empty(1024, device=DEVICE)
if world > 1:
    sends = [dist.P2POp(dist.isend, torch.ones(1024, device=DEVICE), (rank + 1) % world)]
    for work in dist.batch_isend_irecv([*sends, dist.P2POp(dist.irecv, into, (rank - 1) % world)]):
        work.wait()
    assert into.sum().item() == 1024
dist.destroy_process_group()
"""
_DETACHED = """
import rankscope
start()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).to(DEVICE))
attached = rankscope.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
model(torch.ones(2, 8, device=DEVICE)).sum().backward()
attached.detach()
assert type(dist.group.WORLD) is torch._C._distributed_c10d.ProcessGroup
model(torch.ones(2, 8, device=DEVICE)).sum().backward()
dist.destroy_process_group()
"""
_GRAPH = """
import rankscope
start()
model = torch.nn.Linear(64, 64).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
rankscope.attach(model, optimizer)
data = torch.ones(16, 64, device=DEVICE)
def step():
    optimizer.zero_grad(set_to_none=True)
    model(data).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()
for _ in range(5):
    graph.replay()
torch.cuda.synchronize()
dist.destroy_process_group()
"""
_SYMMETRIC = """
import torch.distributed._symmetric_memory as symmetric
start()
value = symmetric.empty(1024, device=DEVICE)
symmetric.rendezvous(value, dist.group.WORLD.group_name)
dist.destroy_process_group()
"""
_STUCK = """
import time
start()
value = torch.ones(1 << 20, device=DEVICE)
for _ in range(5):
    dist.all_reduce(value)
if ON_GPU:
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        torch.cuda._sleep(1 << 34)
    dist.all_reduce(value)
    torch.cuda.synchronize()
dist.destroy_process_group()
"""


def _script(place: Place, *, name: str, body: str, needs_gpu: bool = False, min_ranks: int = 1) -> Result:
    if needs_gpu and not place.has_gpu:
        return not_here("needs a GPU")
    if place.num_ranks < min_ranks:
        return not_here(f"needs {min_ranks} GPUs")
    done = run_script(place, name, body)
    return passed(f"{place.num_ranks} ranks") if not done.code else failed(done.last_line)


def _check(title: str, name: str, body: str, *, needs_gpu: bool = False, min_ranks: int = 1) -> Check:
    run: Callable[[Place], Result] = partial(_script, name=name, body=body, needs_gpu=needs_gpu, min_ranks=min_ranks)
    return Check(name=title, run=run)


CHECKS = (
    _check("groups split by a mesh", "mesh", _MESH),
    _check("batched sends and receives", "batched", _BATCHED),
    _check("groups after detach", "detached", _DETACHED),
    _check("CUDA graph of a whole step", "graph", _GRAPH, needs_gpu=True),
    _check("symmetric memory", "symmetric", _SYMMETRIC, needs_gpu=True, min_ranks=2),
    _check("a long kernel does not look like a hang", "slow_kernel", _STUCK, needs_gpu=True),
)
