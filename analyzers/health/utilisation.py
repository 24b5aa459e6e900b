"""Model FLOPs utilisation (MFU): share of the devices' peak FLOP/s that the model uses.

    flops_per_token(run.manifest())                         # as the trainer recorded it; None for other models
    mfu(manifest, tokens_per_s=41_000.0, num_devices=8)     # 0.43; None if not known
    why_not_judged(manifest)                                # "the peak of a toaster ... is not known"; None if it is

As PaLM defines it (Chowdhery et al. 2022, appendix B): 6 N + 12 L d T operations a token for forward and backward, with
N the number of weights that multiply each token (in a mixture of experts only the routed experts); recomputation by
activation checkpointing is not counted. The peak is the one for the training precision.

Peaks are dense peaks from data sheets, by device name and matmul precision. If a sheet only has figures with sparsity,
half of it is used; for GeForce cards, the peak with accumulation in fp32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from probes.settings.described import DataFacts, ModelFacts, TrainFacts
from probes.settings.section import read

__all__ = ["flops_per_token", "mfu", "peak_flops_per_s", "why_not_judged"]

_DENSE: tuple[tuple[str, float | None, float | None, float | None, float], ...] = (
    # name, bf16, fp16, tf32, fp32 outside of tensor cores; None: the device has no such unit
    ("V100-SXM2", None, 125, None, 15.7),
    ("V100-SXM3", None, 125, None, 15.7),
    ("V100-PCIE", None, 112, None, 14),
    ("V100S-PCIE", None, 130, None, 16.4),
    ("Tesla T4", None, 65, None, 8.1),
    ("A10", 125, 125, 62.5, 31.2),
    ("A30", 165, 165, 82, 10.3),
    ("A40", 149.7, 149.7, 74.8, 37.4),
    ("A100", 312, 312, 156, 19.5),
    ("A800", 312, 312, 156, 19.5),
    ("RTX A6000", 154.8, 154.8, 77.4, 38.7),
    ("RTX 3090", 71, 71, 35.6, 35.6),
    ("RTX 3090 Ti", 80, 80, 40, 40),
    ("L4", 121, 121, 60, 30.3),
    ("L40", 181, 181, 90.5, 90.5),
    ("L40S", 362, 362, 183, 91.6),
    ("RTX 6000 Ada", 364.2, 364.2, 182.1, 91.1),
    ("RTX 4090", 165.2, 165.2, 82.6, 82.6),
    ("RTX 5090", 209.5, 209.5, 104.8, 104.8),
    ("H20", 148, 148, 74, 44),
    ("H100", 989.5, 989.5, 494.7, 67),  # the SXM variant, whose name ends with its memory: "H100 80GB HBM3"
    ("H100 PCIe", 756, 756, 378, 51),
    ("H100 NVL", 835.5, 835.5, 417.5, 60),
    ("H200", 989.5, 989.5, 494.7, 67),
    ("H200 NVL", 835.5, 835.5, 417.5, 60),
    ("GH200", 989.5, 989.5, 494.7, 67),
    ("B100", 1750, 1750, 875, 60),
    ("B200", 2250, 2250, 1125, 75),
    ("GB200", 2500, 2500, 1250, 80),
    ("MI210", 181, 181, None, 45.3),
    ("MI250", 181, 181, None, 45.3),  # half of a card's peak, because a program sees its two dies as two devices
    ("MI250X", 191.5, 191.5, None, 47.9),
    ("MI300A", 980.6, 980.6, 490.3, 122.6),
    ("MI300X", 1307.4, 1307.4, 653.7, 163.4),
    ("MI325X", 1307.4, 1307.4, 653.7, 163.4),
)

PEAKS_TFLOPS = {
    name: {"bf16": bf16, "fp16": fp16, "tf32": tf32, "float32": float32} for name, bf16, fp16, tf32, float32 in _DENSE
}
"""Dense peaks in 1e12 FLOP/s by a part of the device's name and by precision, from the makers' data sheets."""


def flops_per_token(manifest: Mapping[str, Any]) -> float | None:
    """Operations of forward and backward per token of the trainer's transformer: as recorded by the trainer, or from
    the configuration of an older run."""
    counted = manifest.get("flops_per_token")
    if isinstance(counted, (int, float)) and not isinstance(counted, bool):
        return float(counted) if counted > 0 else None
    model, seq_len = read(ModelFacts, manifest), read(DataFacts, manifest).seq_len
    dim, layers, vocab = model.dim, model.num_layers, model.vocab_size
    parameters = manifest.get("num_parameters")
    if not (dim and layers and seq_len and vocab) or not isinstance(parameters, int):
        return None
    # The embedding is only looked up. An embedding that is also the head multiplies each token once.
    weights = (
        parameters
        - (0 if model.tie_embeddings else vocab * dim)
        - (2 * layers + 1) * dim
        - _idle_weights(model, dim, layers)
    )
    return 6 * weights + 12 * layers * dim * seq_len


def mfu(manifest: Mapping[str, Any], *, tokens_per_s: float, num_devices: int) -> float | None:
    """Share of the peak of all devices."""
    operations, peak = flops_per_token(manifest), _peak(manifest)
    if operations is None or peak is None or num_devices < 1:
        return None
    return tokens_per_s * operations / (peak * num_devices)


def why_not_judged(manifest: Mapping[str, Any]) -> str | None:
    """Reason why there is no MFU; None if there is one."""
    if flops_per_token(manifest) is None:
        return "the operations per token are known only for Rankscope's own models"
    if _peak(manifest) is None:
        name, precision = manifest.get("device_name"), read(TrainFacts, manifest).precision or "float32"
        return f"the peak of {name if isinstance(name, str) else 'this processor'} in {precision} is not known"
    return None


def _peak(manifest: Mapping[str, Any]) -> float | None:
    name = manifest.get("device_name")
    if not isinstance(name, str):
        return None
    return peak_flops_per_s(
        name,
        read(TrainFacts, manifest).precision or "float32",
        str(manifest.get("float32_matmul_precision") or "highest"),
    )


def _idle_weights(model: ModelFacts, dim: float, layers: float) -> float:
    """Weights of the experts that a token is not sent to."""
    experts, chosen = model.num_experts or 0, model.experts_per_token or 0
    if not experts:
        return 0.0
    rounding = model.multiple_of or 1.0
    derived = -(-(8 * dim // 3) // rounding) * rounding
    width = model.expert_dim or model.hidden_dim or derived
    return layers * (experts - chosen) * 3 * dim * width


def peak_flops_per_s(device_name: str, precision: str, float32_matmul: str = "highest") -> float | None:
    """Peak FLOP/s of the device with the longest listed name that occurs, as whole words, in `device_name`.

    `precision`: training precision (bf16, fp16, float32). `float32_matmul`: torch's setting of float32 matmul
    precision; with values other than `highest`, tensor cores compute float32 products in tf32. For a slice of a device
    (MIG) no peak is published.
    """
    if re.search(r"\bMIG\b", device_name):
        return None
    names = [
        name for name in PEAKS_TFLOPS if re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", device_name)
    ]
    if not names:
        return None
    peaks = PEAKS_TFLOPS[max(names, key=len)]
    as_tf32 = precision == "float32" and float32_matmul != "highest" and peaks["tf32"] is not None
    tflops = peaks.get("tf32" if as_tf32 else precision)
    return None if tflops is None else tflops * 1e12
