"""Map parameter names to Hugging Face's Llama names, and write a `config.json` that its loader understands.

    to_llama("blocks.3.mlp.up.weight")                       # "model.layers.3.mlp.up_proj.weight"
    from_llama("model.layers.3.mlp.up_proj.weight")          # "blocks.3.mlp.up.weight"; None if there is no counterpart
    llama_config(config.model)                               # a dict: architectures, hidden_size, rope_theta, ...

The layers are the same, including the pairing of head dimensions in rotary embeddings, so only names differ.
"""

from __future__ import annotations

import re
from typing import Any

from trainer.config.config import ModelConfig

__all__ = ["from_llama", "llama_config", "to_llama"]

_WHOLE = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_OF_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_WHOLE_BACK = {theirs: ours for ours, theirs in _WHOLE.items()}
_OF_BLOCK_BACK = {theirs: ours for ours, theirs in _OF_BLOCK.items()}


def to_llama(name: str) -> str:
    """Convert a name. Raises KeyError for a parameter that Llama lacks, such as an expert's."""
    if name in _WHOLE:
        return _WHOLE[name]
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)\.weight", name)
    if match is None or match[2] not in _OF_BLOCK:
        raise KeyError(name)
    return f"model.layers.{match[1]}.{_OF_BLOCK[match[2]]}.weight"


def from_llama(name: str) -> str | None:
    """Convert a name; None for tensors that Llama does not have, such as the table of rotary frequencies."""
    if name in _WHOLE_BACK:
        return _WHOLE_BACK[name]
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    if match is None or match[2] not in _OF_BLOCK_BACK:
        return None
    return f"blocks.{match[1]}.{_OF_BLOCK_BACK[match[2]]}.weight"


def llama_config(model: ModelConfig) -> dict[str, Any]:
    """Config for transformers 4 and 5, with the rotary base under both of their keys."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.dim // model.num_heads,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_seq_len,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }
