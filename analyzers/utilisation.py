"""Model FLOPs utilisation (MFU): what of the devices' peak goes into the model.

    flops_per_token(run.manifest())                         # from its `config.model`; None if it is another's model
    mfu(manifest, tokens_per_s=41_000.0, num_devices=8)     # 0.43; None where the device's peak is not known

As PaLM defines it (Chowdhery et al. 2022, appendix B): 6 N + 12 L d T operations a token for forward and backward, with
N the weights that multiply each token; what activation checkpointing computes again does not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .runsettings import number

__all__ = ["PEAKS", "flops_per_token", "mfu"]

PEAKS = {"H200": 989.5e12, "H100": 989.5e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12}
"""Dense bf16 peaks by a part of the device's name, FLOP/s, from the vendors' data sheets."""


def flops_per_token(manifest: Mapping[str, Any]) -> float | None:
    """Operations of forward and backward for a token of our transformer."""
    dim, layers = number(manifest, "model.dim"), number(manifest, "model.num_layers")
    seq_len, vocab = number(manifest, "data.seq_len"), number(manifest, "model.vocab_size")
    parameters = manifest.get("num_parameters")
    if not (dim and layers and seq_len and vocab) or not isinstance(parameters, int):
        return None
    config = manifest.get("config")
    tied = bool(config["model"].get("tie_embeddings")) if isinstance(config, Mapping) else False
    # The embedding is looked up, not multiplied with; if it is also the head, it is multiplied with once.
    weights = parameters - (0 if tied else vocab * dim) - (2 * layers + 1) * dim
    return 6 * weights + 12 * layers * dim * seq_len


def mfu(manifest: Mapping[str, Any], *, tokens_per_s: float, num_devices: int) -> float | None:
    """Share of the peak of all devices."""
    operations, name = flops_per_token(manifest), manifest.get("device_name")
    peak = next((value for part, value in PEAKS.items() if isinstance(name, str) and part in name), None)
    if operations is None or peak is None or num_devices < 1:
        return None
    return tokens_per_s * operations / (peak * num_devices)
