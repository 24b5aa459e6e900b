"""Refuse settings that this machine cannot run, before anything is created: in the launcher, and in each rank.

    check_machine(config, has_gpu=may_have_gpu())            # the launcher, without torch
    check_machine(config, has_gpu=torch.cuda.is_available())

The launcher refuses settings that certainly cannot work. Each rank checks whether its GPU supports the settings.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from pathlib import Path

from trainer.config.config import Config, TrainConfig
from trainer.config.load import ConfigError

__all__ = ["check_compiler", "check_float8_on", "check_machine", "check_ranks_here", "may_have_gpu"]

_DEVICE_FILES = ("nvidia[0-9]*", "kfd", "dxg")
"""Device files of NVIDIA, AMD and WSL."""
_PACKAGES = ("torch", "safetensors", "fsspec")
"""Packages that every rank imports."""


def check_machine(config: Config, *, has_gpu: bool) -> None:
    """Raise ConfigError for a setting that needs a GPU if there is none, or a package that is not installed."""
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"training needs {', '.join(missing)}: pip install 'rankscope[train]'")
    if config.train.device == "cuda" and not has_gpu:
        raise ConfigError("train.device = 'cuda': no CUDA device is available; allowed here: cpu, auto")
    on_cpu = config.train.device == "cpu" or not has_gpu
    if on_cpu and config.parallel.cpu_offload != "none":
        raise ConfigError(
            f"parallel.cpu_offload = {config.parallel.cpu_offload!r}: needs train.device = 'cuda'; "
            "a CPU has everything in host memory already"
        )
    if on_cpu and config.parallel.async_tp:
        raise ConfigError("parallel.async_tp = true: needs train.device = 'cuda', whose memory ranks can share")
    if on_cpu and config.train.backend == "nccl":
        raise ConfigError("train.backend = 'nccl': needs a GPU, and none is used here; allowed: gloo, auto")
    check_float8_on(config.train, "cpu" if on_cpu else "cuda")
    if config.train.compile is True:
        check_compiler(config.train, "cpu" if on_cpu else "cuda")


def check_ranks_here(config: Config, num_ranks: int, devices: Path = Path("/dev")) -> None:
    """Raise ConfigError for more ranks on this node than visible GPUs. A single visible GPU proves nothing, because a
    launcher may show each rank only its own.
    """
    if config.train.device != "cuda":
        return
    listed = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    visible = len(listed) or len(list(devices.glob("nvidia[0-9]*")))
    if 1 < visible < num_ranks:
        raise ConfigError(f"{num_ranks} ranks: only {visible} GPUs are visible here; start at most one rank per GPU")


def check_float8_on(train: TrainConfig, device_type: str) -> None:
    """Raise ConfigError for fp8 matrix products without torchao, or on a device type that does not support them."""
    if train.float8 == "none":
        return
    setting = f"train.float8 = {train.float8!r}"
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(f"{setting}: needs torchao, which is not installed: pip install 'rankscope[fp8]'")
    if not train.float8_emulated and device_type != "cuda":
        instead = "use train.precision = 'bf16', or train.float8_emulated = true to emulate fp8"
        raise ConfigError(f"{setting}: no fp8 matrix products on {device_type.upper()}; {instead}")


def check_compiler(train: TrainConfig, device_type: str) -> None:
    """Raise ConfigError if inductor needs a C++ compiler and would not find one in the first step."""
    if train.compile_backend != "inductor" or device_type != "cpu":
        return
    compilers = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    if not any(name and shutil.which(name) for name in compilers):
        raise ConfigError(
            "train.compile = true: inductor needs a C++ compiler on a CPU and finds none (g++, clang++ or $CXX); "
            "install one, or set train.compile_backend = 'aot_eager'"
        )


def may_have_gpu(devices: Path = Path("/dev")) -> bool:
    """Return False if torch can certainly not use a GPU here. Does not import torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    try:
        if importlib.metadata.version("torch").endswith("+cpu"):
            return False
    except importlib.metadata.PackageNotFoundError:
        pass  # torch is a vendor's build, which has another package name
    return any(True for pattern in _DEVICE_FILES for _ in devices.glob(pattern))
