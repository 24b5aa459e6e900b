"""Build everything that a training loop needs, from a configuration and a plan.

    plan = resolve(config, world_size)                  # before the process group: mistakes are one line
    ...init_process_group...
    training = build(config, plan, device)
    for step in range(config.train.steps):
        batch = training.batch(step + skipped)          # span "data"
        loss = training.forward_backward(batch)         # spans "forward" and "backward", one pair per microbatch
        norm = training.clip().norm                     # the same on all ranks; NaN or Inf, never an exception
        if math.isfinite(norm): training.step(step)     # spans "optimizer"
        else: training.discard()                        # gradients dropped, parameters untouched

`build` needs the default process group if the world has more than one rank. The caller chooses the batch number, and
skips a batch by adding one to it.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from probes.recorder import NullRecorder, Recorder
from trainer.config.config import Config
from trainer.config.load import ConfigError
from trainer.config.machine import check_compiler, check_machine
from trainer.data.corpus import open_corpus
from trainer.data.mixture import Mixture, TokenSource
from trainer.data.prefetch import Prefetcher
from trainer.data.streams import training_stream, validation_streams
from trainer.layout.loss_chunks import is_chunked
from trainer.layout.plan import Plan
from trainer.model.checkpointing import apply_activation_checkpointing
from trainer.model.compiling import compile_blocks, is_compiled
from trainer.model.float8 import check_float8, convert_to_float8
from trainer.parallel.mesh import build_mesh, submesh
from trainer.parallel.parallelize import parallelize
from trainer.parallel.pipeline import Pipeline, stage_modules
from trainer.training.loss import token_loss
from trainer.training.optimizer import build_optimizer
from trainer.training.precision import LossScaler
from trainer.training.rank_training import Training

__all__ = ["Training", "build", "pick_backend", "pick_device"]


def pick_device(config: Config, local_rank: int) -> torch.device:
    """The device of this rank. Raises ConfigError if the configured device does not exist or does not support the
    settings.
    """
    device = _device(config, local_rank)
    check_float8(config.train, device)
    return device


def _device(config: Config, local_rank: int) -> torch.device:
    check_machine(config, has_gpu=torch.cuda.is_available())
    if config.train.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if config.train.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError("train.precision = 'bf16': this GPU has no bf16; allowed: float32, fp16")
    visible = torch.cuda.device_count()
    if visible == 1:
        return torch.device("cuda", 0)  # the launcher shows each rank only its own GPU
    if local_rank >= visible:
        raise ConfigError(f"local rank {local_rank}: only {visible} GPUs are visible; start at most one rank per GPU")
    return torch.device("cuda", local_rank)


def pick_backend(config: Config, device: torch.device) -> str:
    """gloo or nccl. Raises ConfigError for nccl without a GPU."""
    wanted = config.train.backend
    if wanted == "nccl" and device.type != "cuda":
        raise ConfigError(f"train.backend = 'nccl': needs train.device = 'cuda', not {device.type!r}; allowed: gloo")
    if wanted == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    return wanted


def build(
    config: Config,
    plan: Plan,
    device: torch.device,
    *,
    recorder: Recorder | None = None,
    corpus: TokenSource | Mixture | None = None,
    with_weights: bool = True,
) -> Training:
    """Make model, optimizer and data for this rank. Collective: all ranks call it at the same time.

    Without `with_weights` the parameters have no values until a checkpoint or `Training.fill_weights` gives them.
    Raises ConfigError for data that cannot be used.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    corpus = corpus or open_corpus(config.data, config.model.vocab_size)
    validation = validation_streams(config, corpus)
    _agree_on_data([corpus, *(stream.corpus for stream in validation.values())], device)
    mesh = build_mesh(plan, device.type)
    pp_rank = plan.coordinates(rank)["pp"]
    if config.parallel.async_tp:
        _set_up_async_tp(mesh, device)
    parts = []
    with torch.device("meta"):
        stages = stage_modules(config, plan, pp_rank)
    for module in stages:
        convert_to_float8(module, config.train, tp=plan.tp)
        apply_activation_checkpointing(module, config.train)
        if is_compiled(config.train, plan, device):
            check_compiler(config.train, device.type)
            compile_blocks(module, config.train.compile_backend)
        parts.append(parallelize(module, config, plan, mesh, device))
    replicas = submesh(mesh, "dp_replicate") if plan.zero1 else None
    modules: list[nn.Module] = [part.module for part in parts]
    scaler = LossScaler() if config.train.precision == "fp16" else None

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        value = token_loss(logits, targets)
        return value if scaler is None else value * scaler.scale

    stream = training_stream(config, corpus)
    loader = Prefetcher(
        stream,
        plan.data_rank(rank),
        plan.data_size,
        num_workers=config.data.num_workers,
        ahead=config.data.prefetch,
        pin=config.data.pin_memory and device.type == "cuda",
    )
    training = Training(
        config=config,
        plan=plan,
        device=device,
        rank=rank,
        mesh=mesh,
        parts=parts,
        optimizer=build_optimizer(
            modules,
            config.optim,
            shared_by=replicas.get_group() if replicas else None,
            on_host=config.parallel.cpu_offload == "optimizer",
        ),
        stream=stream,
        loader=loader,
        validation=validation,
        scaler=scaler,
        pipeline=Pipeline(parts, config, plan, mesh, device, pp_rank, loss) if plan.pp > 1 else None,
        loss_in_chunks=is_chunked(config.train, plan, device.type),
        recorder=recorder or NullRecorder(),
    )
    if with_weights:
        training.fill_weights()
    return training


def _set_up_async_tp(mesh: DeviceMesh | None, device: torch.device) -> None:
    from trainer.parallel.async_tensor import check_async_tp, enable_async_tp  # imports the compiler

    tp_mesh = submesh(mesh, "tp")
    assert tp_mesh is not None
    check_async_tp(device, tp_mesh)
    enable_async_tp(tp_mesh)


def _agree_on_data(corpora: list[TokenSource | Mixture], device: torch.device) -> None:
    """Check that all ranks have the same data. Without this check, a node with another Python version or other files
    would silently train on other batches.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    digest = hashlib.sha256("".join(corpus.digest for corpus in corpora).encode()).hexdigest()
    own = int(digest[:15], 16)
    bounds = torch.tensor([own, -own], device=device)
    dist.all_reduce(bounds, op=dist.ReduceOp.MIN)
    if bounds[0].item() != -bounds[1].item():
        raise ConfigError(
            f"data.path: ranks read different data (rank {dist.get_rank()} has {corpora[0].digest}); "
            "all nodes need the same files, or the same Python for the default text"
        )
