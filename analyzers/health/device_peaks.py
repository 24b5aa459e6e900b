"""Peak FLOP/s of devices: dense peaks by name and precision of matrix products, from data sheets.

    peak_flops_per_s("NVIDIA H100 PCIe", "bf16")       # 7.56e14; None for a device or a precision that is not listed

Of sheets that print figures with sparsity alone the half is meant; tensor cores of GeForce cards accumulate in fp32.
"""

from __future__ import annotations

import re

__all__ = ["PEAKS_TFLOPS", "peak_flops_per_s"]

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
    ("H100", 989.5, 989.5, 494.7, 67),  # SXM, whose name ends in its memory: "H100 80GB HBM3"
    ("H100 PCIe", 756, 756, 378, 51),
    ("H100 NVL", 835.5, 835.5, 417.5, 60),
    ("H200", 989.5, 989.5, 494.7, 67),
    ("H200 NVL", 835.5, 835.5, 417.5, 60),
    ("GH200", 989.5, 989.5, 494.7, 67),
    ("B100", 1750, 1750, 875, 60),
    ("B200", 2250, 2250, 1125, 75),
    ("GB200", 2500, 2500, 1250, 80),
    ("MI210", 181, 181, None, 45.3),
    ("MI250", 181, 181, None, 45.3),  # half a card each: a program sees its two dies as two devices
    ("MI250X", 191.5, 191.5, None, 47.9),
    ("MI300A", 980.6, 980.6, 490.3, 122.6),
    ("MI300X", 1307.4, 1307.4, 653.7, 163.4),
    ("MI325X", 1307.4, 1307.4, 653.7, 163.4),
)

PEAKS_TFLOPS = {
    name: {"bf16": bf16, "fp16": fp16, "tf32": tf32, "float32": float32} for name, bf16, fp16, tf32, float32 in _DENSE
}
"""Dense peaks in 1e12 FLOP/s by a part of the device's name and by precision, from the makers' data sheets."""


def peak_flops_per_s(device_name: str, precision: str, float32_matmul: str = "highest") -> float | None:
    """FLOP/s of a device whose name holds one of the listed ones as whole words, the longest of them.

    `precision` is that of the training (bf16, fp16, float32), `float32_matmul` torch's setting by that name: all but
    `highest` lets tensor cores take float32 products as tf32. A slice of a device (MIG) has no peak that is published.
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
