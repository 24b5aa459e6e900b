"""Model FLOPs utilisation (MFU): share of the devices' peak that goes into the model.

    flops_per_token(run.manifest())                         # what the trainer wrote; None if it is another's model
    mfu(manifest, tokens_per_s=41_000.0, num_devices=8)     # 0.43; None where it is not known
    why_not_judged(manifest)                                # "the peak of a toaster ... is not known"; None if it is

As PaLM defines it (Chowdhery et al. 2022, appendix B): 6 N + 12 L d T operations a token for forward and backward, with
N the weights that multiply each token (of a mixture of experts those of the experts that a token is sent to); what
activation checkpointing computes again does not count. The peak is that of the precision of the training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analyzers.health.device_peaks import peak_flops_per_s
from probes.settings.described import DataFacts, ModelFacts, TrainFacts
from probes.settings.section import read

__all__ = ["flops_per_token", "mfu", "why_not_judged"]


def flops_per_token(manifest: Mapping[str, Any]) -> float | None:
    """Operations of forward and backward for a token of our transformer: as the trainer counted them, or, in a run
    that was recorded before it did, from the configuration."""
    counted = manifest.get("flops_per_token")
    if isinstance(counted, (int, float)) and not isinstance(counted, bool):
        return float(counted) if counted > 0 else None
    model, seq_len = read(ModelFacts, manifest), read(DataFacts, manifest).seq_len
    dim, layers, vocab = model.dim, model.num_layers, model.vocab_size
    parameters = manifest.get("num_parameters")
    if not (dim and layers and seq_len and vocab) or not isinstance(parameters, int):
        return None
    # The embedding is looked up, not multiplied with; if it is also the head, it is multiplied with once.
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
