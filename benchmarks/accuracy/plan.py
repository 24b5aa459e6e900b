"""Error of `rankscope plan`: compared with the allocator's memory and the traffic that the probes record.

    python -m benchmarks.accuracy.plan               # all tables, about three minutes
    python -m benchmarks.accuracy.plan --memory      # without the table of traffic
    python -m benchmarks.accuracy.plan --layouts "DDP|ring|expert"      # memory of layouts whose name matches

Memory is measured on a CPU, for a single process and for rank 0 of two and four ranks, from the allocator's events
during a step; parameters, gradients and moments are counted directly. Traffic is measured in real training runs over
gloo.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.accuracy.plan_ranks import measure_layout
from benchmarks.cost.allocator import allocated
from benchmarks.harness import argument_parser
from probes.tape.rundir import RunDir
from store import Store
from trainer.config.config import Config
from trainer.config.load import load_config
from trainer.layout.resolve import resolve
from trainer.model.checkpointing import apply_activation_checkpointing
from trainer.model.initial_weights import initialise
from trainer.model.transformer import Attention, Transformer
from trainer.plan.footprint.memory import rank_memory
from trainer.plan.traffic import rank_traffic
from trainer.training.loss import token_loss
from trainer.training.optimizer import build_optimizer

__all__ = ["Measured", "measure"]

_SMALL = ["data.seq_len=128", "train.global_batch_size=4", "model.hidden_dim=352"]
_EXPERTS = ["model.num_experts=8", "model.expert_dim=128"]
_MEMORY = {
    "4 layers of 128": [],
    "2 layers of 256, 32 tokens": ["model.num_layers=2", "model.dim=256", "model.hidden_dim=704", "data.seq_len=32"],
    "grouped queries": ["model.num_kv_heads=2"],
    "tied embeddings": ["model.tie_embeddings=true"],
    "bf16": ["train.precision=bf16"],
    "recompute all": ["train.activation_checkpointing=full"],
    "recompute every second": ["train.activation_checkpointing=every_n"],
    "recompute selectively": ["train.activation_checkpointing=selective"],
    "moments in 8 bits": ["optim.name=adamw8bit"],
    "8 experts, 2 for a token": [*_EXPERTS],
    "experts with a capacity, bf16": [*_EXPERTS, "model.capacity_factor=1.25", "train.precision=bf16"],
    "experts, recompute all": [*_EXPERTS, "train.activation_checkpointing=full"],
    "experts, recompute selectively": [*_EXPERTS, "train.activation_checkpointing=selective"],
}
_PIECES = {
    "half of each sequence": (2, []),
    "a quarter, grouped queries": (4, ["model.num_kv_heads=2"]),
    "half, recompute all": (2, ["train.activation_checkpointing=full"]),
}
"""Ranks of a `cp` group, and settings."""
_DDP = ["parallel.dp_replicate=2", "parallel.dp_shard=1"]
_RING = ["parallel.dp_shard=1", "parallel.cp_exchange=ring"]
_EP_FSDP = ["parallel.dp_shard=2", "parallel.ep=2", *_EXPERTS]
_ONE_A_PASS = ["train.micro_batch_size=1"]
_LAYOUTS = {
    "context parallel": (2, ["parallel.dp_shard=1", "parallel.cp=2"]),
    "context parallel, grouped queries": (2, ["parallel.dp_shard=1", "parallel.cp=2", "model.num_kv_heads=2"]),
    "context parallel, recompute all": (
        2,
        ["parallel.dp_shard=1", "parallel.cp=2", "train.activation_checkpointing=full"],
    ),
    "context parallel, bf16": (2, ["parallel.dp_shard=1", "parallel.cp=2", "train.precision=bf16"]),
    "context parallel of 4": (4, ["parallel.dp_shard=1", "parallel.cp=4"]),
    "context parallel x FSDP": (4, ["parallel.dp_shard=2", "parallel.cp=2"]),
    "expert parallel x FSDP": (4, _EP_FSDP),
    "expert parallel x FSDP, recompute all": (4, [*_EP_FSDP, "train.activation_checkpointing=full"]),
    "expert parallel x FSDP, recompute selectively": (4, [*_EP_FSDP, "train.activation_checkpointing=selective"]),
    "expert parallel x FSDP, bf16": (4, [*_EP_FSDP, "train.precision=bf16"]),
    "expert parallel x FSDP, 2 microbatches": (4, [*_EP_FSDP, *_ONE_A_PASS, "train.global_batch_size=8"]),
    "FSDP, 2 microbatches": (2, ["parallel.dp_shard=2", *_ONE_A_PASS]),
    "FSDP, 2 microbatches, each reduced": (
        2,
        ["parallel.dp_shard=2", *_ONE_A_PASS, "parallel.reduce_every_microbatch=true"],
    ),
    "expert parallel": (2, ["parallel.dp_shard=1", "parallel.ep=2", *_EXPERTS]),
    "FSDP": (2, ["parallel.dp_shard=2"]),
    "FSDP, bf16": (2, ["parallel.dp_shard=2", "train.precision=bf16"]),
    "TP": (2, ["parallel.dp_shard=1", "parallel.tp=2"]),
    "TP, recompute all": (2, ["parallel.dp_shard=1", "parallel.tp=2", "train.activation_checkpointing=full"]),
    "TP, recompute all, no sequence parallel": (
        2,
        [
            "parallel.dp_shard=1",
            "parallel.tp=2",
            "parallel.sequence_parallel=false",
            "train.activation_checkpointing=full",
        ],
    ),
    "DDP": (2, _DDP),
    "DDP, bf16 gradients": (2, [*_DDP, "parallel.gradient_compression=bf16"]),
    "DDP, PowerSGD": (2, [*_DDP, "parallel.gradient_compression=powersgd", "parallel.powersgd_start=2"]),
    "DDP, int8": (2, [*_DDP, "parallel.gradient_compression=int8"]),
    "DDP, top-k": (2, [*_DDP, "parallel.gradient_compression=topk"]),
    "ring of 2": (2, [*_RING, "parallel.cp=2"]),
    "ring of 4": (4, [*_RING, "parallel.cp=4"]),
    "expert choice": (2, ["parallel.dp_shard=1", "parallel.ep=2", *_EXPERTS, "model.expert_routing=expert"]),
    "expert choice x FSDP": (4, [*_EP_FSDP, "model.expert_routing=expert"]),
}
"""Ranks, and settings."""
_TRAFFIC = {
    "DDP": (2, ["parallel.dp_replicate=2", "parallel.dp_shard=1"]),
    "FSDP": (2, ["parallel.dp_shard=2"]),
    "FSDP, 4 microbatches": (2, ["parallel.dp_shard=2", "train.micro_batch_size=2"]),
    "FSDP, parameters kept": (2, ["parallel.dp_shard=2", "parallel.reshard_after_forward=false"]),
    "FSDP bf16": (2, ["parallel.dp_shard=2", "train.precision=bf16"]),
    "HSDP": (4, ["parallel.dp_shard=2", "parallel.dp_replicate=2"]),
    "TP": (2, ["parallel.dp_shard=1", "parallel.tp=2"]),
    "TP without sequence parallel": (2, ["parallel.dp_shard=1", "parallel.tp=2", "parallel.sequence_parallel=false"]),
    "TP, recompute all": (2, ["parallel.dp_shard=1", "parallel.tp=2", "train.activation_checkpointing=full"]),
    "pipeline": (2, ["parallel.dp_shard=1", "parallel.pp=2"]),
    "DDP, ZeRO-1": (2, ["parallel.dp_replicate=2", "parallel.dp_shard=1", "parallel.zero1=true"]),
    "DDP, bf16 gradients": (2, [*_DDP, "parallel.gradient_compression=bf16"]),
    "DDP, PowerSGD": (2, [*_DDP, "parallel.gradient_compression=powersgd", "parallel.powersgd_start=2"]),
    "context parallel": (2, ["parallel.dp_shard=1", "parallel.cp=2"]),
    "context parallel x FSDP, recompute all": (
        4,
        ["parallel.dp_shard=2", "parallel.cp=2", "train.activation_checkpointing=full"],
    ),
    "experts, FSDP": (2, ["parallel.dp_shard=2", *_EXPERTS]),
    "expert parallel": (2, ["parallel.dp_shard=1", "parallel.ep=2", *_EXPERTS]),
    "expert parallel x FSDP, recompute all": (
        4,
        ["parallel.dp_shard=2", "parallel.ep=2", *_EXPERTS, "train.activation_checkpointing=full"],
    ),
}
_SMALLEST_CALL_BYTES = 256
"""Smaller calls (loss, norm, verdicts) are not part of a plan."""
_STEP = 4
"""The measured step; the first steps have additional calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes."""

    parameters: int
    optimizer: int
    kept_by_forward: int
    peak: int


def measure(config: Config, *, num_pieces: int = 1) -> Measured:
    """Measure a step of one process on the CPU. It gets the first of `num_pieces` pieces of each sequence, and uses
    copies of that piece for the others.
    """
    model = Transformer(config.model)
    initialise(model, config.model, seed=0)
    model.num_chunks = num_pieces
    for module in model.modules() if num_pieces > 1 else ():
        if isinstance(module, Attention):
            module.gather = lambda piece: torch.cat([piece] * num_pieces, dim=-2)
    apply_activation_checkpointing(model, config.train)
    optimizer = build_optimizer([model], config.optim)
    tokens = torch.randint(
        0, config.model.vocab_size, (config.train.global_batch_size, config.data.seq_len // num_pieces)
    )

    def forward() -> torch.Tensor:
        low = config.train.precision == "bf16"
        with torch.autocast("cpu", dtype=torch.bfloat16) if low else contextlib.nullcontext():
            return token_loss(model(tokens), tokens.clone())

    def step() -> None:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # creates the optimizer's state
    kept_by_forward, _ = allocated(forward)
    _, peak_bytes = allocated(step)
    parameters = sum(value.numel() * value.element_size() for value in model.parameters())
    moments = sum(each.numel() * each.element_size() for state in optimizer.state.values() for each in state.values())
    return Measured(
        parameters=parameters,
        optimizer=moments,
        kept_by_forward=kept_by_forward,
        peak=parameters + moments + peak_bytes,
    )


def _memory_table() -> None:
    print(
        "| memory, one process on a CPU | kept by forward, MB | planned | peak, MB | planned |\n|---|---|---|---|---|"
    )
    for name, overrides in _MEMORY.items():
        config = load_config(None, [*_SMALL, *overrides])
        real, need = measure(config), rank_memory(config, resolve(config, 1), pp_rank=0, device="cpu")
        kept = need.activations + need.gathered
        print(
            f"| {name} | {real.kept_by_forward / 1e6:.2f} | {kept / real.kept_by_forward - 1:+.1%} "
            f"| {real.peak / 1e6:.2f} | {need.peak / real.peak - 1:+.1%} |",
            flush=True,
        )
    for name, (num_pieces, overrides) in _PIECES.items():
        config = load_config(None, [*_SMALL, *overrides, f"parallel.cp={num_pieces}"])
        real = measure(config, num_pieces=num_pieces)
        kept = rank_memory(config, resolve(config, num_pieces), pp_rank=0, device="cpu").activations
        error = kept / real.kept_by_forward - 1
        print(f"| context parallel: {name} | {real.kept_by_forward / 1e6:.2f} | {error:+.1%} | - | - |", flush=True)


def _rank_table(names: str) -> None:
    print("\n| memory of rank 0, real ranks on a CPU | peak, MB | planned |\n|---|---|---|")
    for name, (num_ranks, overrides) in _LAYOUTS.items():
        if not re.search(names, name):
            continue
        config = load_config(None, [*_SMALL, *overrides])
        real = measure_layout(config, num_ranks)
        need = rank_memory(config, resolve(config, num_ranks), pp_rank=0, device="cpu")
        print(f"| {name} | {real.peak / 1e6:.2f} | {need.peak / real.peak - 1:+.1%} |", flush=True)


def _traffic_table(folder: Path) -> None:
    print("\n| traffic of rank 0 in a step | calls | planned | kB | planned |\n|---|---|---|---|---|")
    for name, (num_ranks, overrides) in _TRAFFIC.items():
        settings = [*overrides, "train.steps=5", "checkpoint.interval=0", "checkpoint.memory_interval=0"]
        settings += ["model.dim=96", "data.seq_len=96", f"run.dir={folder}", "run.name=planned"]
        config = load_config(None, settings)
        command = [sys.executable, "-m", "rankscope", "train", "--nproc-per-node", str(num_ranks)]
        for setting in settings:
            command += ["--set", setting]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        calls, num_bytes = _recorded(RunDir.open(folder / "latest"))
        planned = rank_traffic(config, resolve(config, num_ranks), pp_rank=0)
        for op in dict.fromkeys(call.op for call in planned):
            count = sum(call.calls for call in planned if call.op == op)
            total = sum(call.num_bytes for call in planned if call.op == op)
            print(
                f"| {name}: {op} | {calls[op]} | {count} | {num_bytes[op] / 1e3:.1f} "
                f"| {total / max(1, num_bytes[op]) - 1:+.1%} |",
                flush=True,
            )


def _recorded(run: RunDir) -> tuple[Counter[str], Counter[str]]:
    """Calls and bytes by operation of rank 0."""
    calls: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    with Store.open(run) as store:
        query = (
            "SELECT op, count(*) AS calls, sum(bytes) AS num_bytes FROM collectives "
            "WHERE rank = 0 AND step = ? AND bytes > ? GROUP BY op"
        )
        for op, count, total in store.rows(query, [_STEP, _SMALLEST_CALL_BYTES]):
            calls[op], num_bytes[op] = count, int(total)
    return calls, num_bytes


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--memory", action="store_true", help="only the memory tables")
    parser.add_argument("--layouts", metavar="NAMES", help="only memory of matching layouts, e.g. 'DDP|ring'")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.layouts:
        _rank_table(options.layouts)
        return
    _memory_table()
    _rank_table("")
    if not options.memory:
        with tempfile.TemporaryDirectory() as folder:
            _traffic_table(Path(folder))


if __name__ == "__main__":
    main()
