"""Weights to and from Hugging Face's Llama: transformers computes what we compute, and back again, on any mesh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from tests.processes import run_ranks
from tests.trainer.layouts import tiny
from trainer.config.config import ModelConfig
from trainer.config.load import ConfigError
from trainer.layout.resolve import resolve
from trainer.model.initial_weights import initialise
from trainer.model.llama_names import from_llama, llama_config, to_llama
from trainer.model.transformer import Transformer
from trainer.model.weights import load_weights
from trainer.training.build import build

transformers = pytest.importorskip("transformers")

GROUPED = ModelConfig(vocab_size=300, dim=64, num_layers=3, num_heads=8, num_kv_heads=2, hidden_dim=96, max_seq_len=64,
                      rope_theta=500_000.0, norm_eps=1e-6)  # fmt: skip


def as_llama(folder: Path, config: ModelConfig, seed: int = 3) -> Transformer:
    """A model of ours, and the same one as a Llama in `folder`."""
    model = Transformer(config)
    initialise(model, config, seed=seed)
    names = dict(model.named_parameters())
    save_file({to_llama(name): value.detach().clone() for name, value in names.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    (folder / "config.json").write_text(json.dumps(llama_config(config)))
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_computes_the_same_logits(tmp_path: Path, tied: bool) -> None:
    config = GROUPED.model_copy(update={"tie_embeddings": tied})
    ours = as_llama(tmp_path, config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    tokens = torch.randint(0, config.vocab_size, (2, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = theirs(tokens).logits, ours(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert found.std() > 0.1  # there is something to compare


def test_what_transformers_has_saved_is_read(tmp_path: Path) -> None:
    settings = transformers.LlamaConfig(**{**llama_config(GROUPED), "torch_dtype": None})
    torch.manual_seed(5)
    theirs = transformers.LlamaForCausalLM(settings).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="60KB")  # several files and an index
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours = Transformer(GROUPED)
    load_weights(ours, tmp_path)
    tokens = torch.randint(0, 300, (1, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def test_names_lead_back() -> None:
    for name, _ in Transformer(GROUPED).named_parameters():
        assert from_llama(to_llama(name)) == name
    assert from_llama("model.layers.0.self_attn.rotary_emb.inv_freq") is None
    with pytest.raises(KeyError):
        to_llama("blocks.0.experts.up")


def test_wrong_weights_are_one_line(tmp_path: Path) -> None:
    as_llama(tmp_path, GROUPED)
    cases = {
        r": blocks.3.\S+ not found": GROUPED.model_copy(update={"num_layers": 4}),
        "is 300 x 64, the configuration's model has 400 x 64": GROUPED.model_copy(update={"vocab_size": 400}),
    }
    for said, config in cases.items():
        with pytest.raises(ConfigError, match=said) as error:
            load_weights(Transformer(config), tmp_path)
        assert "\n" not in str(error.value)
    for content in (b"", b"not safetensors at all", b"\xff" * 64):
        wrong = tmp_path / "wrong.safetensors"
        wrong.write_bytes(content)
        with pytest.raises(ConfigError, match="cannot be read"):
            load_weights(Transformer(GROUPED), wrong)
    (tmp_path / "empty").mkdir()
    for place, said in (("empty", "no .safetensors file found"), ("nothing-here", "No such file")):
        with pytest.raises(ConfigError, match=said):
            load_weights(Transformer(GROUPED), tmp_path / place)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../outside.safetensors"}}')
    with pytest.raises(ConfigError, match="cannot be read"):
        load_weights(Transformer(GROUPED), tmp_path)


def loaded(rank: int, world_size: int, folder: str, layouts: list[dict[str, int]]) -> list[bool]:
    """For each layout: whether this rank's parameters are those of the file."""
    whole = load_file(Path(folder) / "model.safetensors")
    same = []
    for parallel in layouts:
        config = tiny(parallel=parallel, model={"weights": folder})
        training = build(config, resolve(config, world_size), torch.device("cpu"))
        checks = []
        for name, parameter in training.named_parameters():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            checks.append(torch.equal(full, whole[to_llama(name)]))
        same.append(bool(checks) and all(checks))
        training.close()
        dist.barrier()
    return same


def test_every_mesh_begins_with_the_same_weights(tmp_path: Path) -> None:
    as_llama(tmp_path, tiny().model)
    layouts: list[dict[str, Any]] = [
        {"dp_replicate": 4, "dp_shard": 1}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "pp": 2},
    ]  # fmt: skip
    found = run_ranks(loaded, world_size=4, args=(str(tmp_path), layouts), deadline_s=100)
    assert found == [[True] * len(layouts)] * 4
