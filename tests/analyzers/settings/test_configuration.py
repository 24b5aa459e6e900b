from __future__ import annotations

import copy
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from analyzers.diagnose import diagnose
from analyzers.finding import Finding
from analyzers.health.utilisation import flops_per_token, mfu, peak_flops_per_s, why_not_judged
from analyzers.report.terminal.diagnosis_text import render
from analyzers.scope import Scope
from analyzers.settings.analyze import RULES, configuration
from analyzers.verdict.run_facts import run_facts
from tests.analyzers.judged import checked
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
        if key:
            manifest["config"][section][key] = value
        else:
            manifest[name] = value
    found = checked(configuration(store, Scope(manifest=manifest)))
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


def with_utilisation(share: float, samples: int = 60) -> MemoryStore:
    store = plain_run()
    readings = [
        {"sample_ns": number, "node": "a", "device": f"GPU-{device}", "gpu_utilization_ratio": share}
        for number in range(samples)
        for device in range(4)
    ]
    store.add("health", readings)
    store.add("health", [{"sample_ns": 0, "node": "a", "device": "host"}])
    return store


def test_a_sound_configuration_is_silent() -> None:
    assert told(plain_run()) == {}
    assert told(pipelined(16), parallel__pp=4) == {}


@pytest.mark.parametrize(
    ("cause", "store", "settings", "words"),
    [
        ("buckets", plain_run, {"parallel__ddp_bucket_mb": 0.5}, "946 buckets"),
        ("buckets", plain_run, {"parallel__ddp_bucket_mb": 5000.0}, "into one bucket"),
        ("microbatches", lambda: pipelined(4), {"parallel__pp": 4}, "leave 43 % of the pipeline's time empty"),
        ("tensor_parallel", lambda: changed("UPDATE ranks SET tp = rank, dp_replicate = 0, host = 'node-' || rank % 2"),
         {}, "1 tensor-parallel group spans 2 hosts"),
        ("batch", lambda: changed("UPDATE ranks SET device = 'cuda:0'; UPDATE steps SET tokens = 256"),
         {}, "256 tokens"),
        ("fp16", plain_run, {"train__precision": "fp16", "train__loss_scaling": False}, "without a loss scale"),
        ("compression", lambda: changed("UPDATE steps SET compression_error = 0.8 WHERE step % 5 = 0"),
         {"parallel__gradient_compression": "powersgd"}, "(powersgd) differ from uncompressed ones by 80 %"),
        ("compression", lambda: changed("UPDATE steps SET compression_error = 0.01 + step * 0.001 WHERE step % 2 = 0"),
         {"parallel__gradient_compression": "int8"}, "(int8) are getting less accurate: they differed from "
                                                     "uncompressed ones by 1.9 %"),
        ("checkpoint_interval", lambda: changed(f"UPDATE steps SET start_ns = start_ns + {900 * S} WHERE step > 50"),
         {"checkpoint__interval": 0}, "a failure costs all"),
        ("checkpoint_interval", lambda: changed(f"UPDATE checkpoints SET stall_ns = {200 * MS}"),
         {}, "costs 10 % of the time"),
        ("workers", lambda: changed(f"UPDATE steps SET data_ns = {30 * MS}"), {}, "30 % of a step"),
        ("evaluation", lambda: changed(f"UPDATE steps SET evaluate_ns = {20 * MS}"),
         {"train__eval_interval": 5}, "20 %"),
        ("plan", plain_run, {"planned": {"rank": 0, "step_s": 0.04}},
         "time of a step 0.1 s instead of 0.04 s (+150 %)"),
        ("utilisation", lambda: with_utilisation(0.71), {}, "GPU utilization is 71 % in the median of 240 samples"),
    ],
)  # fmt: skip
def test_each_rule_fires_on_the_effect_of_its_setting(
    cause: str, store: Any, settings: dict[str, Any], words: str
) -> None:
    found = told(store(), **settings)
    assert list(found) == [cause]
    assert words in found[cause].summary


def test_every_rule_is_tried() -> None:
    tried = test_each_rule_fires_on_the_effect_of_its_setting.pytestmark[0].args[1]
    assert {cause for cause, *_ in tried} == set(RULES)


@pytest.mark.parametrize(
    ("store", "settings"),
    [
        (lambda: changed(f"UPDATE steps SET data_ns = {30 * MS}"), {"data__num_workers": 4}),
        (lambda: changed(f"UPDATE steps SET evaluate_ns = {20 * MS}"), {}),
        (lambda: plain_run(steps=40), {"checkpoint__interval": 0}),
        (lambda: changed("UPDATE steps SET compression_error = 0.4"), {"parallel__gradient_compression": "powersgd"}),
        (
            lambda: changed("UPDATE steps SET compression_error = if(step < 20, 0, 0.1)"),
            {"parallel__gradient_compression": "powersgd"},
        ),
        (
            lambda: changed("UPDATE steps SET compression_error = 0.01 * step WHERE step < 15"),
            {"parallel__gradient_compression": "topk"},
        ),
        (lambda: changed("UPDATE ranks SET host = 'node-' || rank"), {}),
        (lambda: changed("UPDATE steps SET tokens = 256"), {}),
        (plain_run, {"train__precision": "fp16"}),
        (plain_run, {"planned": {"rank": 0, "step_s": 0.08}}),
        (lambda: plain_run(steps=14), {"planned": {"rank": 0, "step_s": 0.01}}),
        (lambda: with_utilisation(0.95), {}),
        (lambda: with_utilisation(0.5, samples=10), {}),
    ],
)
def test_a_setting_that_did_no_harm_is_not_blamed(store: Any, settings: dict[str, Any]) -> None:
    assert told(store(), **settings) == {}


def test_missing_records_are_reported() -> None:
    for store, manifest in ((plain_run(), {}), (plain_run(), {"config": 3}), (MemoryStore(), MANIFEST)):
        (finding,) = configuration(store, Scope(manifest=manifest))
        assert (finding.status, finding.kind) == ("insufficient_data", "configuration")


def test_utilisation_agrees_with_the_count_of_the_trainer() -> None:
    from trainer.config.config import Config, ModelConfig
    from trainer.model.size import flops_per_token as counted
    from trainer.model.size import num_parameters

    mixture = {"num_experts": 8, "experts_per_token": 2}
    for settings in ({}, {"tie_embeddings": True}, mixture, mixture | {"expert_dim": 96}, mixture | {"hidden_dim": 80}):
        model = ModelConfig(dim=64, num_layers=3, num_heads=4, num_kv_heads=2, **settings)
        config = Config(model=model, train={"precision": "bf16"}).model_dump(mode="json")
        manifest = {"config": config, "num_parameters": num_parameters(model), "device_name": "NVIDIA H200"}
        assert flops_per_token(manifest) == counted(model, config["data"]["seq_len"]), "recorded before it was written"
    assert flops_per_token(manifest | {"flops_per_token": 7_000}) == 7_000, "what the trainer wrote goes before"
    assert mfu(manifest, tokens_per_s=1e9, num_devices=2) == pytest.approx(1e9 * flops_per_token(manifest) / 1979e12)
    assert mfu(manifest | {"device_name": "a toaster"}, tokens_per_s=1e9, num_devices=2) is None
    facts = run_facts(plain_run(), MANIFEST | {"device_name": "NVIDIA H100 80GB HBM3"})
    expected = facts["tokens_per_s"] * facts["model_tflops_per_s"] / facts["tokens_per_s"] * 1e12 / (4 * 989.5e12)
    assert facts["mfu_ratio"] == pytest.approx(expected, abs=1e-4)
    assert run_facts(plain_run(), {})["mfu_ratio"] is None


def test_what_has_no_utilisation_says_why() -> None:
    assert why_not_judged(MANIFEST | {"device_name": "NVIDIA H200"}) is None
    assert "a toaster in bf16" in str(why_not_judged(MANIFEST | {"device_name": "a toaster"}))
    attached = {"attached": True, "num_parameters": 10, "device_name": "NVIDIA H200", "config": {}}
    facts = run_facts(plain_run(), attached)
    assert facts["mfu_ratio"] is None
    assert "only for Rankscope's own models" in facts["mfu_not_judged"]


@pytest.mark.parametrize(
    ("name", "precision", "matmul", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", "highest", 989.5),
        ("NVIDIA H100 80GB HBM3", "float32", "highest", 67),
        ("NVIDIA H100 80GB HBM3", "float32", "high", 494.7),
        ("NVIDIA H100 PCIe", "bf16", "highest", 756),
        ("NVIDIA H100 NVL", "fp16", "highest", 835.5),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", "highest", None),
        ("Tesla V100-SXM2-32GB", "fp16", "highest", 125),
        ("Tesla V100-SXM2-32GB", "bf16", "highest", None),
        ("Tesla V100-SXM2-32GB", "float32", "high", 15.7),
        ("NVIDIA A100-SXM4-80GB", "bf16", "highest", 312),
        ("NVIDIA A10", "bf16", "highest", 125),
        ("NVIDIA A10G", "bf16", "highest", None),
        ("NVIDIA RTX A4000", "bf16", "highest", None),
        ("NVIDIA L4", "bf16", "highest", 121),
        ("NVIDIA L40S", "bf16", "highest", 362),
        ("NVIDIA GB200", "bf16", "highest", 2500),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", "highest", 80),
        ("AMD Instinct MI300X", "bf16", "highest", 1307.4),
        ("a toaster", "bf16", "highest", None),
    ],
)
def test_the_peak_is_that_of_the_device_and_the_precision(
    name: str, precision: str, matmul: str, tflops: float | None
) -> None:
    peak = peak_flops_per_s(name, precision, matmul)
    assert peak == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_the_report_of_a_gpu_run_says_why_it_has_no_utilisation() -> None:
    store = plain_run()
    attached = {"run_id": "theirs", "attached": True, "device_name": "NVIDIA H200", "config": {}}

    def text() -> str:
        console = Console(file=StringIO(), width=100)
        render(diagnose(store, attached), console)
        return console.file.getvalue()

    assert "MFU" not in text(), "nobody misses it on a CPU"
    store.connection.execute("UPDATE ranks SET device = 'cuda:0'")
    assert "Not judged: the operations per token" in text()


def test_no_interval_is_advised_that_is_longer_than_the_run() -> None:
    advice = told(changed(f"UPDATE checkpoints SET stall_ns = {200 * MS}"))["checkpoint_interval"]
    assert advice.evidence["suggested_steps"] <= 100
    assert "One save at the end of the 100 steps would cost" in advice.summary
    planned = told(changed(f"UPDATE checkpoints SET stall_ns = {200 * MS}"), train__steps=10_000_000)
    assert "The best interval, " in planned["checkpoint_interval"].summary
    for one in (advice, planned["checkpoint_interval"]):
        assert "Daly" not in one.summary
        assert "0.0 %" not in one.summary


@pytest.mark.parametrize(("steps_an_attempt", "is_advised"), [(50, False), (40, False), (20, True)])
def test_one_or_two_failures_give_no_failure_rate_for_advice(steps_an_attempt: int, is_advised: bool) -> None:
    store = changed(f"UPDATE checkpoints SET stall_ns = {1 * MS}")
    store.connection.execute(f"UPDATE steps SET attempt = (step - 1) // {steps_an_attempt}")
    assert ("checkpoint_interval" in told(store)) is is_advised
