"""The hardware of a plan: devices, devices per node, and the links within and between nodes.

    hardware = parse_hardware(gpu="h100", gpu_memory="80GB", gpus_per_node=8, interconnect="nvlink,ib400")
    hardware.bandwidth(stride=1, size=8)     # bytes/s of a ring of 8 neighbours: all in one node

    parse_hardware(gpu="h100", interconnect="nvlink,eth100/2", ...)          # two devices share an adapter

Figures of devices and links are data: `hardware.toml` next to this file. A file of the same form (`--hardware`) adds or
replaces entries.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainer.config.load import ConfigError

__all__ = ["Hardware", "named_hardware", "parse_bytes", "parse_hardware"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_PRECISIONS = ("float32", "bf16", "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    gpu: str
    memory_bytes: int
    flops_per_s: Mapping[str, float]
    """Dense peak of matrix products in FLOP/s by precision (float32, bf16, fp16), and for devices with fp8 by the
    supported values of `train.float8`.

    fp8 peaks are for sums in float32. B200: half of the 9 PFLOP/s with sparsity in the Blackwell brief (2024). H100
    and H200 SXM: half of the 3,958 TFLOP/s with sparsity in their data sheets. RTX 4090: "FP8 with FP32 accumulate" in
    the Ada whitepaper.
    """
    memory_bytes_per_s: float
    host_bytes_per_s: float
    """Bandwidth of the bus between a device and the host, in one direction."""
    gpus_per_node: int
    inside: str
    inside_bytes_per_s: float
    between: str
    between_bytes_per_s: float
    """Bandwidth per device: a shared adapter is divided among its devices, since all of them send at the same time."""
    host_memory_bytes: int | None = None
    """Host memory of a node; None if unknown."""
    watts: float
    """Largest power limit of a device."""

    def spans_nodes(self, *, stride: int, size: int) -> bool:
        """True if a group of `size` ranks, `stride` apart, spans nodes; ranks fill nodes in order."""
        return size > 1 and stride * size > self.gpus_per_node

    def num_nodes(self, *, stride: int, size: int) -> int:
        """Number of nodes on which a group of `size` ranks, `stride` apart, has members."""
        if not self.spans_nodes(stride=stride, size=size):
            return 1
        return math.ceil(size / max(1, self.gpus_per_node // stride))

    def bandwidth(self, *, stride: int, size: int) -> float:
        """Bytes/s available to a ring over the group.

        A group with several members in a node uses the network adapters of all of these members, or their shares of an
        adapter.
        """
        if not self.spans_nodes(stride=stride, size=size):
            return self.inside_bytes_per_s
        members_of_node = max(1, self.gpus_per_node // stride)
        return min(self.inside_bytes_per_s, members_of_node * self.between_bytes_per_s)

    def peak(self, precision: str) -> float:
        """Peak FLOP/s of matrix products in this precision. Raises ConfigError."""
        if precision not in self.flops_per_s:
            known = [name for name in _PRECISIONS if name in self.flops_per_s]
            raise ConfigError(
                f"train.precision = '{precision}': {self.gpu} does not support it; use {' or '.join(known)}"
            )
        return self.flops_per_s[precision]

    def crosses_nodes(self, first: Sequence[int], second: Sequence[int]) -> bool:
        """True if a rank of `first` and its peer in `second` are on different nodes; ranks fill nodes in order."""
        return any(a // self.gpus_per_node != b // self.gpus_per_node for a, b in zip(first, second, strict=True))

    def send_bandwidth(self, first: Sequence[int], second: Sequence[int]) -> float:
        """Bytes/s at which a rank of `first` sends to its peer in `second` while all other ranks of `first` do the
        same."""
        crosses = self.crosses_nodes(first, second)
        return min(self.inside_bytes_per_s, self.between_bytes_per_s) if crosses else self.inside_bytes_per_s


def parse_hardware(
    *,
    gpu: str,
    gpu_memory: str,
    gpus_per_node: int,
    interconnect: str,
    host_memory: str = "",
    table: Path | None = None,
) -> Hardware:
    """Make the hardware from the options of `rankscope plan`; `table` is a TOML file with more devices and links.
    Raises ConfigError, one line."""
    known = _known() if table is None else _with_table(table)
    facts = _entry(known["gpu"], gpu, "--gpu")
    inside, _, between = (part.strip() for part in interconnect.partition(","))
    inside = facts["inside"] if inside in ("", "nvlink") else inside
    between, _, shared = (part.strip() for part in (between or "ib400").partition("/"))
    adapter = _entry(known["link"], between, "--interconnect")
    num_sharing = _num_sharing(shared) if shared else int(adapter.get("gpus_per_adapter", 1))
    half = facts.get("bf16_tflops", facts.get("fp16_tflops"))
    tflops = {"float32": facts["float32_tflops"], "bf16": facts.get("bf16_tflops"), "fp16": half}
    return Hardware(
        gpu=gpu,
        memory_bytes=parse_bytes(gpu_memory, "--gpu-memory") if gpu_memory else round(facts["memory_gb"] * 10**9),
        flops_per_s={
            name: rate * 1e12 for name, rate in (tflops | facts.get("fp8_tflops", {})).items() if rate is not None
        },
        memory_bytes_per_s=facts["memory_tb_per_s"] * 1e12,
        host_bytes_per_s=_entry(known["link"], facts["host_link"], "host_link")["gb_per_s"] * 1e9,
        host_memory_bytes=parse_bytes(host_memory, "--host-memory") if host_memory else None,
        gpus_per_node=gpus_per_node,
        inside=inside,
        inside_bytes_per_s=_entry(known["link"], inside, "--interconnect")["gb_per_s"] * 1e9,
        between=between + (f" shared by {num_sharing}" if num_sharing > 1 else ""),
        between_bytes_per_s=adapter["gb_per_s"] * 1e9 / min(num_sharing, gpus_per_node),
        watts=facts["watts"],
    )


def named_hardware(device_name: str) -> Hardware | None:
    """Hardware of a named device, such as `NVIDIA H100 80GB HBM3`, with its usual links; None if unknown."""
    words = re.split(r"[^a-z0-9]+", device_name.lower())
    names = {*words, *(first + second for first, second in pairwise(words))}  # "RTX 4090" is known as "rtx4090"
    gpu = next((name for name in _known()["gpu"] if name in names), None)
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


_NUMBERS = {
    "gpu": {"memory_gb", "float32_tflops", "memory_tb_per_s", "watts"},
    "link": {"gb_per_s"},
}
_TEXTS = {"inside", "host_link"}
_OPTIONAL = {"bf16_tflops", "fp16_tflops", "gpus_per_adapter"}


def _with_table(path: Path) -> dict[str, dict[str, Any]]:
    """Add the checked devices and links of a file to the known ones."""
    try:
        read = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--hardware {path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hardware {path}: no TOML ({error})") from None
    known = {kind: dict(entries) for kind, entries in _known().items()}
    for kind, entries in read.items():
        if kind not in known or not isinstance(entries, dict):
            raise ConfigError(f"--hardware {path}: {kind}: must be [gpu.NAME] or [link.NAME]")
        for name, facts in entries.items():
            _check_entry(f"--hardware {path}: {kind}.{name}", kind, facts)
            known[kind][name] = facts
    return known


def _check_entry(where: str, kind: str, facts: Any) -> None:
    if not isinstance(facts, dict):
        raise ConfigError(f"{where}: must be a table")
    needed = _NUMBERS[kind] | (_TEXTS if kind == "gpu" else set())
    if missing := sorted(needed - facts.keys()):
        raise ConfigError(f"{where}: lacks {', '.join(missing)}")
    if kind == "gpu" and not {"bf16_tflops", "fp16_tflops"} & facts.keys():
        raise ConfigError(f"{where}: lacks bf16_tflops or fp16_tflops")
    rates = facts.get("fp8_tflops", {})
    if not isinstance(rates, dict) or rates.keys() - {"tensorwise", "rowwise"}:
        raise ConfigError(f"{where}.fp8_tflops: must be like {{ tensorwise = 1979, rowwise = 1979 }}")
    numbers = {key: facts[key] for key in (_NUMBERS[kind] | _OPTIONAL) & facts.keys()}
    for key, value in (numbers | {f"fp8_tflops.{key}": value for key, value in rates.items()}).items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ConfigError(f"{where}.{key} = {value!r}: must be a number above 0")
    if not all(isinstance(facts[key], str) for key in _TEXTS & facts.keys()):
        raise ConfigError(f"{where}: {' and '.join(sorted(_TEXTS))} must be names of links")


def _num_sharing(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--interconnect /{text}: must be the number of devices that share an adapter, like eth100/2")
    return int(text)
