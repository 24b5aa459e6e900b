"""Published training runs compared with `rankscope plan`: layout, MFU and the planned values.

    python -m benchmarks.accuracy.published_plans

Where MFU was not published, it is computed from the published GPU-hours and tokens with the plan's FLOPs per token.
Those hours include everything else in a run (restarts, evaluations). No device is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness import markdown_head, markdown_row
from trainer.config.config import Config
from trainer.layout.resolve import resolve
from trainer.plan.expected import Expected, expect
from trainer.plan.hardware import parse_hardware
from trainer.plan.strategies import Strategies, strategies

__all__ = ["PUBLISHED", "Published", "compare", "markdown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    name: str
    source: str
    gpu: str
    num_gpus: int
    sequences: int
    """Sequences per step."""
    model: Mapping[str, Any]
    layout: str
    """The published layout, or a note that it was not published."""
    parallel: Mapping[str, Any] = field(default_factory=dict)
    """The same layout, or the closest one of this trainer."""
    train: Mapping[str, Any] = field(default_factory=dict)
    mfu: float | None = None
    tokens: float = 0.0
    gpu_hours: float = 0.0
    note: str = ""

    @property
    def config(self) -> Config:
        seq_len = self.model["max_seq_len"]
        train = {"precision": "bf16", "global_batch_size": self.sequences, **self.train}
        return Config.model_validate(
            {"model": self.model, "data": {"seq_len": seq_len}, "parallel": self.parallel, "train": train}
        )


def _model(
    vocab: int, dim: int, layers: int, heads: int, kv: int, hidden: int, seq: int, **more: Any
) -> dict[str, Any]:
    return {"vocab_size": vocab, "dim": dim, "num_layers": layers, "num_heads": heads, "num_kv_heads": kv,
            "hidden_dim": hidden, "max_seq_len": seq, **more}  # fmt: skip


_EACH = {"micro_batch_size": 1}
_FULL = {"activation_checkpointing": "full", **_EACH}
PUBLISHED: Sequence[Published] = (
    Published(
        name="GPT-3 175B", source="Korthikanti et al. 2022, table 5", gpu="a100", num_gpus=64, sequences=64,
        model=_model(51200, 12288, 96, 96, 96, 32768, 2048), layout="tp 8 x pp 8, interleaved, selective recomputation",
        parallel={"tp": 8, "pp": 8, "dp_shard": 1, "schedule": "interleaved_1f1b", "stages_per_rank": 3},
        train={"activation_checkpointing": "selective", **_EACH}, mfu=0.514,
        note="planned with SwiGLU (8/3 width) instead of 4x",
    ),
    Published(
        name="Llama 2 70B", source="Llama 2 paper, table 2", gpu="a100", num_gpus=2048, sequences=1024 * 2,
        model=_model(32000, 8192, 80, 64, 8, 28672, 4096), layout="not published",
        parallel={"dp_shard": 256, "dp_replicate": 1, "tp": 8}, train=_EACH, tokens=2e12, gpu_hours=1_720_320,
        note="planned with a batch of 8 M tokens: 4 M would be half a sequence per GPU",
    ),
    Published(
        name="Llama 3 8B", source="Llama 3 model card", gpu="h100", num_gpus=1024, sequences=1024,
        model=_model(128256, 4096, 32, 32, 8, 14336, 8192), layout="not published",
        parallel={"dp_shard": 8, "dp_replicate": 128}, train=_EACH, tokens=15e12, gpu_hours=1.3e6,
    ),
    Published(
        name="Llama 3 70B", source="Llama 3 model card", gpu="h100", num_gpus=2048, sequences=2048,
        model=_model(128256, 8192, 80, 64, 8, 28672, 8192), layout="not published",
        parallel={"dp_shard": 256, "tp": 8}, train=_EACH, tokens=15e12, gpu_hours=6.4e6,
    ),
    Published(
        name="Llama 3 405B", source="Llama 3 paper, table 4", gpu="h100", num_gpus=8192, sequences=2048,
        model=_model(128256, 16384, 126, 128, 8, 53248, 8192), layout="tp 8 x pp 16 x FSDP 64",
        parallel={"tp": 8, "pp": 16, "dp_shard": 64, "schedule": "interleaved_1f1b", "stages_per_rank": 7},
        train=_EACH, mfu=0.43,
    ),
    Published(
        name="OLMo 2 32B", source="OLMo 2 32B release notes", gpu="h100", num_gpus=1024, sequences=2048,
        model=_model(100352, 5120, 64, 40, 8, 27648, 4096), layout="HSDP on 1,280 GPUs",
        parallel={"dp_replicate": 32, "dp_shard": 32}, train={"activation_checkpointing": "selective", **_EACH},
        mfu=0.38, note="planned with 1,024 GPUs, so that the batch divides",
    ),
    Published(
        name="DeepSeek-V3", source="DeepSeek-V3 report, table 1, section 3.2", gpu="h100", num_gpus=2048,
        sequences=14336, model=_model(129280, 7168, 61, 56, 56, 18432, 4096, num_experts=256, experts_per_token=8,
                                      expert_dim=2048),
        layout="ep 64 x pp 16 x ZeRO-1, fp8, DualPipe", parallel={"ep": 64, "pp": 16, "dp_shard": 2}, train=_FULL,
        tokens=14.8e12, gpu_hours=2.664e6,
        note="it used H800: the same peak, less than half the NVLink bandwidth; planned with 14,336 sequences instead "
        "of 15,360, so that they divide, and without latent attention, shared expert, dense layers and fp8",
    ),
    Published(
        name="Mixtral 8x7B", source="README of Megatron Core's MoE (468 TFLOP/s; its reference mapping)",
        gpu="h100", num_gpus=64, sequences=256,
        model=_model(32000, 4096, 32, 32, 8, 14336, 4096, num_experts=8, experts_per_token=2),
        layout="ep 8 x pp 4, interleaved by 8",
        parallel={"ep": 8, "pp": 4, "dp_shard": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 8}, train=_EACH,
        mfu=468 / 989.5,
    ),
)  # fmt: skip


def compare(each: Published) -> tuple[Expected, Strategies]:
    """The plan of the published layout, and the planner's other layouts."""
    hardware = parse_hardware(gpu=each.gpu, gpu_memory="", gpus_per_node=8, interconnect="nvlink,ib400")
    config = each.config
    expected = expect(config, resolve(config, each.num_gpus), hardware)
    return expected, strategies(config, hardware, each.num_gpus)


def published_mfu(each: Published, expected: Expected) -> float:
    """The published MFU, or the MFU computed from the published hours and tokens."""
    if each.mfu is not None:
        return each.mfu
    peak = {"a100": 312e12, "h100": 989.5e12}[each.gpu]
    return each.tokens * expected.flops_per_token / (each.gpu_hours * 3600 * peak)


TITLES = ("training", "GPUs", "published layout", "published MFU", "MFU by plan, same layout", "memory by plan",
          "simplest that fits, by plan", "its MFU", "source")  # fmt: skip


def markdown() -> str:
    rows = [markdown_head(*TITLES)]
    for each in PUBLISHED:
        expected, found = compare(each)
        best = found.simplest
        cells = (
            each.name,
            f"{each.num_gpus:,} {each.gpu}",
            each.layout,
            f"{published_mfu(each, expected):.0%}{'' if each.mfu is not None else ' (from GPU-hours)'}",
            f"{expected.mfu:.0%} ({expected.layout})",
            f"{expected.memory.peak / 1e9:.0f} GB{'' if expected.fits else ', too much'}",
            best.name if best else "none",
            f"{best.expected.mfu:.0%}" if best else "",
            each.source + (f"; {each.note}" if each.note else ""),
        )
        rows.append(markdown_row(*cells))
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown())
