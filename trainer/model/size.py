"""Number of parameters and FLOPs per token of a model, from its configuration alone.

    num_parameters(config.model)                    # of the whole model, all stages and shards together
    flops_per_token(config.model, seq_len=256)      # forward and backward; recomputation is not counted

tokens/s x flops_per_token / the device's peak is the model FLOPs utilisation (MFU) as PaLM defines it (Chowdhery et al.
2022, appendix B): 6 FLOPs per token for each weight that multiplies the token, and 12 x layers x width x sequence for
attention. As in most published figures, the full square of attention counts, although causal attention skips half.
"""

from __future__ import annotations

from trainer.config.config import ModelConfig

__all__ = ["flops_per_token", "num_parameters"]


def num_parameters(config: ModelConfig) -> int:
    """Number of distinct weights; tied embeddings count once."""
    embedding = config.vocab_size * config.dim
    norms = (2 * config.num_layers + 1) * config.dim
    experts = config.num_layers * (config.num_experts or 1) * _expert_weights(config)
    return _shared_weights(config) + experts + norms + (0 if config.tie_embeddings else embedding)


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Floating-point operations of forward and backward for one token of a sequence of `seq_len`.

    With a mixture of experts, only the experts that a token is sent to count.
    """
    experts = config.num_layers * (config.experts_per_token if config.num_experts else 1) * _expert_weights(config)
    return 6 * (_shared_weights(config) + experts) + 12 * config.num_layers * config.dim * seq_len


def _shared_weights(config: ModelConfig) -> int:
    """Number of weights outside feed-forward layers that multiply each token: attention, head and routers, but not the
    embedding, which is only looked up.
    """
    key_value = 2 * config.kv_heads * (config.dim // config.num_heads)
    layer = config.dim * (2 * config.dim + key_value + config.num_experts)
    return config.num_layers * layer + config.vocab_size * config.dim


def _expert_weights(config: ModelConfig) -> int:
    """Number of parameters of one feed-forward layer."""
    return 3 * config.dim * (config.expert_ffn_dim if config.num_experts else config.ffn_dim)
