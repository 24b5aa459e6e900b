"""`[model]`: the shape of the network."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from trainer.config.section import Section

__all__ = ["ModelConfig"]


class ModelConfig(Section):
    vocab_size: int = Field(default=256, ge=2)
    """Size of the vocabulary; 256 for bytes of text."""
    dim: int = Field(default=128, ge=8)
    """Width of the residual stream."""
    num_layers: int = Field(default=4, ge=1, le=10_000)
    """Transformer blocks."""
    num_heads: int = Field(default=4, ge=1)
    """Query heads; they must divide `dim`, and the width of a head must be even."""
    num_kv_heads: int = Field(default=0, ge=0)
    """Key / value heads (grouped-query attention); 0 = as many as `num_heads`."""
    hidden_dim: int = Field(default=0, ge=0)
    """Width of the feed-forward layer; 0 = 8/3 of `dim`, rounded up to `multiple_of`."""
    multiple_of: int = Field(default=32, ge=1)
    """Multiple to which the derived feed-forward width is rounded."""
    max_seq_len: int = Field(default=1024, ge=1)
    """Longest sequence (tokens) for which rotary angles are computed."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary angles."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the mean square in RMSNorm."""
    num_experts: int = Field(default=0, ge=0)
    """Experts (feed-forward layers) in each block; 0 = no mixture of experts."""
    experts_per_token: int = Field(default=2, ge=1)
    """Experts that the router chooses for a token."""
    expert_routing: Literal["token", "expert"] = "token"
    """Each token chooses its experts, or each expert chooses its tokens of a sequence, later tokens included. With
    `expert`, all experts are used equally, and a token can have more experts, fewer or none.
    """
    expert_dim: int = Field(default=0, ge=0)
    """Width of an expert; 0 = as the feed-forward layer."""
    expert_products: Literal["loop", "grouped"] = "loop"
    """Compute a rank's experts one after another, or all in torch's grouped matrix products."""
    capacity_factor: float = Field(default=0.0, ge=0, le=1e6)
    """An expert takes at most this multiple of its even share of a sequence's choices, and drops the rest; 0 = no
    limit. With `expert` routing an expert takes exactly that many; 0 then means 1."""
    balance_loss: float = Field(default=0.01, ge=0)
    """Weight of the loss that keeps experts evenly used."""
    router_z_loss: float = Field(default=0.001, ge=0)
    """Weight of the router's z-loss, which keeps its logits small."""
    tie_embeddings: bool = False
    """The output layer uses the embedding's weights."""
    weights: str = ""
    """Initial weights: a folder or file of safetensors, with Rankscope's or Hugging Face's Llama names; empty =
    random."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of a block's two branches."""

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def ffn_dim(self) -> int:
        """Feed-forward width after the default is resolved."""
        return self.hidden_dim or -(-(8 * self.dim // 3) // self.multiple_of) * self.multiple_of

    @property
    def expert_ffn_dim(self) -> int:
        """An expert's width after the default is resolved."""
        return self.expert_dim or self.ffn_dim

    @model_validator(mode="after")
    def _enough_experts(self) -> ModelConfig:
        if self.num_experts == 1:
            raise ValueError("model.num_experts = 1: leaves nothing to choose; must be 2 or more, or 0 for none")
        if self.num_experts and self.experts_per_token > self.num_experts:
            raise ValueError(
                f"model.experts_per_token = {self.experts_per_token}: at most model.num_experts = {self.num_experts}"
            )
        return self
