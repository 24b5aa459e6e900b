"""The transformer: shapes, causality, names, and initial values that do not depend on the layout."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from tests.trainer.layouts import tiny
from trainer.model.initial_weights import initialise
from trainer.model.size import flops_per_token, num_parameters
from trainer.model.transformer import Transformer


def model_of(**model: object) -> Transformer:
    config = tiny(model=model).model
    transformer = Transformer(config)
    initialise(transformer, config, seed=3)
    return transformer


def test_names_are_those_that_findings_use() -> None:
    names = dict(model_of().named_parameters())
    assert {"embed.weight", "blocks.1.mlp.up.weight", "blocks.0.attention.query.weight", "norm.weight"} <= names.keys()
    assert len(names) == 2 * 9 + 3


def test_a_token_sees_only_what_is_before_it() -> None:
    model = model_of()
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_packed_documents_do_not_see_each_other() -> None:
    config = tiny().model
    model = Transformer(config, separator=0)
    initialise(model, config, seed=3)
    tokens = torch.randint(1, 256, (2, 16))
    tokens[:, 6] = 0
    changed = tokens.clone()
    changed[:, 3] = (changed[:, 3] % 255) + 1
    before, after = model(tokens), model(changed)
    assert not torch.allclose(before[:, 3:7], after[:, 3:7])
    torch.testing.assert_close(before[:, 7:], after[:, 7:])
    # The second document alone is the same document; rotary angles are relative.
    torch.testing.assert_close(model(tokens[:, 7:]), before[:, 7:], rtol=1e-4, atol=1e-5)


def test_positions_matter() -> None:
    model = model_of()
    logits = model(torch.tensor([[5, 9, 9, 9]]))
    assert not torch.allclose(logits[0, 1], logits[0, 3])


def test_grouped_query_attention_has_fewer_key_value_weights() -> None:
    model = model_of(num_kv_heads=2)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes["blocks.0.attention.key.weight"] == (16, 64)
    assert shapes["blocks.0.attention.query.weight"] == (64, 64)
    assert model(torch.zeros(1, 8, dtype=torch.long)).shape == (1, 8, 256)


def test_initial_values_belong_to_names_not_to_the_order_of_drawing() -> None:
    config = tiny().model
    whole = model_of()
    stage = Transformer(config, [1], first=False, last=True)
    initialise(stage, config, seed=3)
    full = dict(whole.named_parameters())
    assert {name for name, _ in stage.named_parameters()} < full.keys()
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter, full[name])
    other = Transformer(config)
    initialise(other, config, seed=4)
    assert not torch.equal(other.blocks["0"].mlp.up.weight, whole.blocks["0"].mlp.up.weight)


def test_stages_in_a_row_are_the_model() -> None:
    config = tiny().model
    first, last = Transformer(config, [0], last=False), Transformer(config, [1], first=False)
    for stage in (first, last):
        initialise(stage, config, seed=3)
    tokens = torch.randint(256, (2, 16))
    torch.testing.assert_close(last(first(tokens)), model_of()(tokens))


def test_tied_embeddings_are_one_parameter() -> None:
    model = model_of(tie_embeddings=True)
    assert model.head is not None
    assert model.embed is not None
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_dropout_only_in_training() -> None:
    model = model_of(dropout=0.5)
    tokens = torch.randint(256, (1, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_untrained_loss_is_that_of_guessing() -> None:
    tokens = torch.randint(256, (8, 33), generator=torch.Generator().manual_seed(0))
    loss = cross_entropy(model_of()(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert abs(loss.item() - 5.545) < 0.1


@pytest.mark.parametrize("tied", [False, True])
def test_size_is_what_torch_counts(tied: bool) -> None:
    config = tiny(model={"tie_embeddings": tied, "num_kv_heads": 2}).model
    assert num_parameters(config) == sum(parameter.numel() for parameter in Transformer(config).parameters())


def test_flops_are_what_torch_counts() -> None:
    """torch's counter knows no fused attention on the CPU, so attention is spelled out for it."""
    config = tiny(model={"num_kv_heads": 8}).model
    model = Transformer(config)
    tokens = torch.zeros(2, 32, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens).sum().backward()
    measured = counter.get_total_flops() / tokens.numel()
    assert flops_per_token(config, 32) == measured
