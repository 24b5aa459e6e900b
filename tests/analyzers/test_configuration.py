from __future__ import annotations

import copy
from typing import Any

import pytest

from analyzers.configuration import RULES, analyze
from analyzers.finding import Finding
from analyzers.runfacts import run_facts
from analyzers.utilisation import flops_per_token, mfu
from tests.analyzers.memory_store import MemoryStore
from tests.analyzers.plain_run import MS, S, plain_run

MANIFEST: dict[str, Any] = {
    "num_parameters": 124_000_000,
    "mesh": {"dp_replicate": 4},
    "world_size": 4,
    "config": {
        "model": {"dim": 768, "num_layers": 12, "vocab_size": 50257, "tie_embeddings": True},
        "parallel": {"ddp_bucket_mb": 25.0, "pp": 1, "schedule": "1f1b"},
        "train": {"precision": "bf16", "eval_interval": 0},
        "data": {"num_workers": 0, "seq_len": 1024},
        "checkpoint": {"interval": 20},
    },
}


def told(store: MemoryStore, **settings: Any) -> dict[str, Finding]:
    manifest = copy.deepcopy(MANIFEST)
    for name, value in settings.items():
        section, _, key = name.partition("__")
        manifest["config"][section][key] = value
    found = analyze(store, manifest)
    assert {finding.status for finding in found} <= {"advice"}
    assert all(finding.advice == f"configuration-{finding.cause}" for finding in found)
    return {finding.cause: finding for finding in found}


def changed(sql: str, **options: Any) -> MemoryStore:
    store = plain_run(**options)
    store.connection.execute(sql)
    return store


def pipelined(microbatches: int) -> MemoryStore:
    store = plain_run()
    row = {"attempt": 0, "rank": 0, "step": 3, "kind": "forward", "stage": 0}
    store.add("spans", [row | {"microbatch": number} for number in range(microbatches)])
    return store


def test_a_sound_configuration_is_silent() -> None:
    assert told(plain_run()) == {}
    assert told(pipelined(16), parallel__pp=4) == {}


@pytest.mark.parametrize(
    ("cause", "store", "settings", "words"),
    [
        ("buckets", plain_run, {"parallel__ddp_bucket_mb": 0.5}, "946 buckets"),
        ("buckets", plain_run, {"parallel__ddp_bucket_mb": 5000.0}, "into one bucket"),
        ("microbatches", lambda: pipelined(4), {"parallel__pp": 4}, "leave 43 % of 1f1b's time empty"),
        ("tensor_parallel", lambda: changed("UPDATE ranks SET tp = rank, dp_replicate = 0, host = 'node-' || rank % 2"),
         {}, "1 tensor-parallel group lie over 2 hosts"),
        ("batch", lambda: changed("UPDATE ranks SET device = 'cuda:0'; UPDATE steps SET tokens = 256"),
         {}, "256 tokens"),
        ("fp16", plain_run, {"train__precision": "fp16", "train__loss_scaling": False}, "without a loss scale"),
        ("compression", lambda: changed("UPDATE steps SET compression_error = 0.8 WHERE step % 5 = 0"),
         {"parallel__gradient_compression": "powersgd"}, "(powersgd) are 80 % away from whole ones"),
        ("checkpoint_interval", lambda: changed(f"UPDATE steps SET start_ns = start_ns + {900 * S} WHERE step > 50"),
         {"checkpoint__interval": 0}, "a failure costs all"),
        ("checkpoint_interval", lambda: changed(f"UPDATE checkpoints SET stall_ns = {200 * MS}"),
         {}, "costs 10.0 % of the time"),
        ("workers", lambda: changed(f"UPDATE steps SET data_ns = {30 * MS}"), {}, "30 % of a step"),
        ("evaluation", lambda: changed(f"UPDATE steps SET evaluate_ns = {20 * MS}"),
         {"train__eval_interval": 5}, "20 %"),
    ],
)  # fmt: skip
def test_each_rule_fires_on_what_a_setting_did(cause: str, store: Any, settings: dict[str, Any], words: str) -> None:
    found = told(store(), **settings)
    assert list(found) == [cause]
    assert words in found[cause].summary


def test_every_rule_is_tried() -> None:
    tried = test_each_rule_fires_on_what_a_setting_did.pytestmark[0].args[1]
    assert {cause for cause, *_ in tried} == set(RULES)


@pytest.mark.parametrize(
    ("store", "settings"),
    [
        (lambda: changed(f"UPDATE steps SET data_ns = {30 * MS}"), {"data__num_workers": 4}),
        (lambda: changed(f"UPDATE steps SET evaluate_ns = {20 * MS}"), {}),
        (lambda: plain_run(steps=40), {"checkpoint__interval": 0}),
        (lambda: changed("UPDATE steps SET compression_error = 0.4"), {"parallel__gradient_compression": "powersgd"}),
        (lambda: changed("UPDATE ranks SET host = 'node-' || rank"), {}),
        (lambda: changed("UPDATE steps SET tokens = 256"), {}),
        (plain_run, {"train__precision": "fp16"}),
    ],
)
def test_a_setting_that_did_no_harm_is_not_blamed(store: Any, settings: dict[str, Any]) -> None:
    assert told(store(), **settings) == {}


def test_what_is_missing_is_said() -> None:
    for store, manifest in ((plain_run(), {}), (plain_run(), {"config": 3}), (MemoryStore(), MANIFEST)):
        (finding,) = analyze(store, manifest)
        assert (finding.status, finding.kind) == ("insufficient_data", "configuration")


def test_utilisation_is_that_of_the_trainers_own_count() -> None:
    from trainer.config import Config, ModelConfig
    from trainer.model.size import flops_per_token as counted
    from trainer.model.size import num_parameters

    for tied in (False, True):
        model = ModelConfig(dim=64, num_layers=3, num_heads=4, num_kv_heads=2, tie_embeddings=tied)
        config = Config(model=model).model_dump(mode="json")
        manifest = {"config": config, "num_parameters": num_parameters(model), "device_name": "NVIDIA H200"}
        assert flops_per_token(manifest) == counted(model, config["data"]["seq_len"])
    assert mfu(manifest, tokens_per_s=1e9, num_devices=2) == pytest.approx(1e9 * flops_per_token(manifest) / 1979e12)
    assert mfu(manifest | {"device_name": "a toaster"}, tokens_per_s=1e9, num_devices=2) is None
    facts = run_facts(plain_run(), MANIFEST | {"device_name": "NVIDIA H100 80GB HBM3"})
    expected = facts["tokens_per_s"] * facts["model_tflops_per_s"] / facts["tokens_per_s"] * 1e12 / (4 * 989.5e12)
    assert facts["mfu_ratio"] == pytest.approx(expected, abs=1e-4)
    assert run_facts(plain_run(), {})["mfu_ratio"] is None
