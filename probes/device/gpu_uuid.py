"""The UUID of a rank's GPU, as NVML and dcgm-exporter name it: what joins a rank with its device's readings.

    device_uuid("cuda:0")        # "GPU-1b7d8f2c-..."; "" on a CPU

The ordinal of a device says nothing outside of the process: CUDA_VISIBLE_DEVICES renumbers devices, and CUDA orders
them by speed where NVML orders them by their place on the bus.
"""

from __future__ import annotations

from typing import Any

__all__ = ["device_uuid", "nvml_name"]


def device_uuid(device: str) -> str:
    """Return the UUID; empty for a CPU, and where this torch does not report it."""
    if not device.startswith("cuda"):
        return ""
    import torch

    properties = torch.cuda.get_device_properties(device)
    is_slice = " MIG " in f" {getattr(properties, 'name', '')} "
    return nvml_name(getattr(properties, "uuid", None), is_slice=is_slice)


def nvml_name(uuid: Any, *, is_slice: bool = False) -> str:
    """CUDA's UUID as NVML writes it: of a GPU, or of a slice of one (MIG)."""
    text = str(uuid or "")
    return text if not text or text.startswith(("GPU-", "MIG-")) else f"{'MIG' if is_slice else 'GPU'}-{text}"
