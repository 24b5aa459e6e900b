"""The machine that a plan is for: its devices, how many to a node, and the links within and between nodes.

    hardware = parse_hardware(gpu="h100", gpu_memory="80GB", gpus_per_node=8, interconnect="nvlink,ib400")
    hardware.bandwidth(stride=1, size=8)     # bytes/s of a ring of 8 neighbours: all in one node

Figures of devices and links are data: `hardware.toml` beside this file.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trainer.config.load import ConfigError

__all__ = ["Hardware", "named_hardware", "parse_bytes", "parse_hardware"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_NVLINK_OF = {"b200": "nvlink5", "h200": "nvlink4", "h100": "nvlink4", "a100": "nvlink3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    gpu: str
    memory_bytes: int
    flops_per_s: Mapping[str, float]
    """Dense peak by precision of the matrix products: float32, bf16, fp16; and, where the device has products in
    fp8, by the values of `train.float8` that it can do.

    Of fp8, with sums in float32: 4500e12 of B200 (half of the 9 PFLOP/s with sparsity of the Blackwell brief, 2024),
    1979e12 of H100 and H200 SXM (half of the 3,958 TFLOP/s with sparsity of their data sheets), 733e12 of L40S (data
    sheet), 330.3e12 of RTX 4090 (Ada whitepaper, "FP8 with FP32 accumulate"). A100 has none.
    """
    memory_bytes_per_s: float
    host_bytes_per_s: float
    """Of the bus between a device and its host, in one direction."""
    gpus_per_node: int
    inside: str
    inside_bytes_per_s: float
    between: str
    between_bytes_per_s: float
    watts: float
    """Largest power limit of a device."""

    def spans_nodes(self, *, stride: int, size: int) -> bool:
        """True if a group of `size` ranks, `stride` apart, spans nodes; ranks fill nodes in order."""
        return size > 1 and stride * size > self.gpus_per_node

    def bandwidth(self, *, stride: int, size: int) -> float:
        """Bytes/s that a ring over the group has for itself.

        Between nodes each device has an adapter of its own: a group with several members in a node uses all of theirs.
        """
        if not self.spans_nodes(stride=stride, size=size):
            return self.inside_bytes_per_s
        members_of_node = max(1, self.gpus_per_node // stride)
        return min(self.inside_bytes_per_s, members_of_node * self.between_bytes_per_s)


def parse_hardware(*, gpu: str, gpu_memory: str, gpus_per_node: int, interconnect: str) -> Hardware:
    """From the options of `rankscope plan`. Raises ConfigError, one line."""
    known = _known()
    facts = _entry(known["gpu"], gpu, "--gpu")
    inside, _, between = (part.strip() for part in interconnect.partition(","))
    inside = _NVLINK_OF.get(gpu, "pcie4") if inside in ("", "nvlink") else inside
    between = between or "ib400"
    return Hardware(
        gpu=gpu,
        memory_bytes=parse_bytes(gpu_memory, "--gpu-memory") if gpu_memory else round(facts["memory_gb"] * 10**9),
        flops_per_s={
            "float32": facts["float32_tflops"] * 1e12,
            "bf16": facts["bf16_tflops"] * 1e12,
            "fp16": facts["bf16_tflops"] * 1e12,
            **{recipe: tflops * 1e12 for recipe, tflops in facts.get("fp8_tflops", {}).items()},
        },
        memory_bytes_per_s=facts["memory_tb_per_s"] * 1e12,
        host_bytes_per_s=_entry(known["link"], facts["host_link"], "host_link")["gb_per_s"] * 1e9,
        gpus_per_node=gpus_per_node,
        inside=inside,
        inside_bytes_per_s=_entry(known["link"], inside, "--interconnect")["gb_per_s"] * 1e9,
        between=between,
        between_bytes_per_s=_entry(known["link"], between, "--interconnect")["gb_per_s"] * 1e9,
        watts=facts["watts"],
    )


def named_hardware(device_name: str) -> Hardware | None:
    """Hardware of a named device, such as `NVIDIA H100 80GB HBM3`, with its usual links; None if unknown."""
    words = re.split(r"[^a-z0-9]+", device_name.lower())
    gpu = next((name for name in _known()["gpu"] if name in words or name in "".join(words)), None)
    return None if gpu is None else parse_hardware(gpu=gpu, gpu_memory="", gpus_per_node=8, interconnect="")


def parse_bytes(text: str, option: str) -> int:
    """`80GB`, `80GiB`, `24g`, `141e9`. Raises ConfigError."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) <= 0 or (match[3] and not match[2]):
        raise ConfigError(f"{option} {text}: must be a size like 80GB or 80GiB")
    unit = match[2].lower()
    factor = 1024 ** " kmgt".index(unit) if match[3] else _UNITS[unit]
    return round(float(match[1]) * factor)


def _entry(table: Mapping[str, Any], name: str, option: str) -> Mapping[str, Any]:
    if name in table:
        found: Mapping[str, Any] = table[name]
        return found
    near = difflib.get_close_matches(name, table, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(table)}"
    raise ConfigError(f"{option} {name}: not known; {hint}")


@cache
def _known() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("hardware.toml").read_text(encoding="utf-8"))
