"""Output layer and cross-entropy in chunks: numbers and gradients are those of the whole logits, which never exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.config.model import ModelConfig
from trainer.layout.loss_chunks import tokens_at_once
from trainer.model import chunked_loss as module
from trainer.model.chunked_loss import Softmax, chunked_loss
from trainer.model.initial_weights import initialise
from trainer.model.transformer import Transformer
from trainer.training.loss import token_loss

TOKENS, DIM, VOCABULARY = 37, 16, 50


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, DIM, requires_grad=True)
    weight = torch.randn(VOCABULARY, DIM, requires_grad=True)
    return hidden, weight, torch.randint(VOCABULARY, (TOKENS,))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("chunk", [10, 37, 1000])
def test_loss_and_gradients_are_those_of_whole_logits(chunk: int, dtype: torch.dtype, tolerance: float) -> None:
    """Backward gets another gradient than one, as with microbatches and a loss scale."""
    found = []
    for is_chunked in (False, True):
        hidden, weight, targets = inputs()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            if is_chunked:
                loss, of_token = chunked_loss(hidden, weight, targets, chunk=chunk)
                assert of_token.mean().item() == pytest.approx(loss.item())
            else:
                loss = F.cross_entropy(F.linear(hidden, weight).float(), targets)
        (3 * loss).backward()
        found.append((loss.detach(), hidden.grad, weight.grad))
    for whole, chunked in zip(*found, strict=True):
        assert whole is not None
        torch.testing.assert_close(chunked, whole, rtol=tolerance, atol=tolerance * whole.abs().max().item())


def test_compiled_softmax_gives_the_same() -> None:
    torch._dynamo.reset()
    found = []
    for softmax in (Softmax.eager(), Softmax.compiled("aot_eager")):
        hidden, weight, targets = inputs()
        loss, _ = chunked_loss(hidden, weight, targets, chunk=10, softmax=softmax)
        loss.backward()
        found.append((loss.detach(), hidden.grad, weight.grad))
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager)
    torch._dynamo.reset()


def test_nothing_is_computed_for_a_gradient_that_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[Any] = []
    monkeypatch.setattr(module.torch, "mm", lambda *args, **kwargs: products.append(args))
    hidden, weight, targets = inputs()
    with torch.no_grad():
        loss, _ = chunked_loss(hidden, weight, targets, chunk=10)
    assert loss.item() == pytest.approx(F.cross_entropy(F.linear(hidden, weight), targets).item(), rel=1e-6)
    assert not products


def test_a_second_backward_pass_is_refused() -> None:
    loss, _ = chunked_loss(*inputs(), chunk=10)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_no_tensor_of_a_step_is_as_large_as_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.model.transformer.tokens_at_once", lambda vocab_size: 8)
    config = ModelConfig(vocab_size=300, dim=16, num_layers=1, num_heads=2, hidden_dim=32)
    model = Transformer(config)
    initialise(model, config, seed=0)
    tokens = torch.arange(128).view(2, 64)
    sizes = {}
    for is_chunked in (False, True):
        with Largest() as largest:
            loss = model(tokens, tokens) if is_chunked else token_loss(model(tokens), tokens)
            loss.backward()
        sizes[is_chunked] = largest.numel
    assert sizes[False] == 128 * 300
    assert sizes[True] < 128 * 300 / 4


@pytest.mark.parametrize(("vocab_size", "tokens"), [(50_304, 10_240), (128_256, 4096), (2**30, 1024)])
def test_a_chunk_is_a_gibibyte_of_logits_in_sixteen_bits(vocab_size: int, tokens: int) -> None:
    assert tokens_at_once(vocab_size) == tokens
