"""Random combinations of trainer settings: each must be refused with one line, or train like a single process.

    python -m benchmarks.accuracy.random_layouts --count 60 --seed 1
    python -m benchmarks.accuracy.random_layouts --only 1:17    # repeat one of them, by its name in the table

A combination is drawn from the settings of `[parallel]`, `[train]`, `[optim]` and `[model]` and trained by 2 or 4 ranks
for 5 steps with the loop of `rankscope train`, including probes, recovery and memory copies. After 3 steps all ranks
stop and resume from the checkpoint. The result is compared with one process that has the same model, data, optimizer
and precision and never stops:

- losses and gradient norms are bitwise identical on all ranks;
- if only the order of summation differs, losses agree within a relative 1e-4 and norms within 1e-3;
- with reduced precision (bf16, fp16, fp8, Muon, AdamW8bit), losses agree within 1 % and norms within 10 %; with
  compressed gradients, losses within 5 %. In fp16, steps are compared up to the first one that either run skips: FSDP's
  scaled gradients are fp16 and overflow earlier than autocast's, until the loss scale has been reduced.

A combination that the launch refuses counts as refused. CPU offload is drawn, too: on a CPU, FSDP applies the same
offload policy.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import argument_parser, markdown_head, markdown_row, write_json
from probes.collectives.wrapped import install, uninstall
from probes.tape.rundir import RunDir
from tests.processes import run_ranks
from tests.trainer.layouts import tiny
from tests.trainer.training_runs import LossRecorder, RunResult
from trainer.checkpoint import attempt_fence
from trainer.config.config import Config
from trainer.config.load import ConfigError
from trainer.layout.resolve import resolve
from trainer.rank.instrument import instrument
from trainer.rank.loop import train
from trainer.rank.session import make_session
from trainer.training.build import build

STEPS = 5
STOP_AFTER = 3
COMPUTED = ("model", "data", "optim")
ROUNDED = {"precision": ("bf16", "fp16"), "float8": ("tensorwise", "rowwise")}
Sections = dict[str, dict[str, Any]]


def draw(number: int, seed: int) -> tuple[int, Sections]:
    """Draw the number of ranks and the settings of a combination; some are invalid."""
    chance = random.Random(f"{seed}:{number}")

    def often(share: float) -> bool:
        return chance.random() < share

    ranks = chance.choice((2, 4))
    dims = ["dp_replicate", "dp_shard", "tp", "cp", "pp", "ep"]
    parallel: dict[str, Any] = dict.fromkeys(dims, 1)
    for _ in range(ranks.bit_length() - 1):
        parallel[chance.choice(dims)] *= 2
    model: dict[str, Any] = {"num_layers": 4}
    train: dict[str, Any] = {"steps": STEPS}
    data: dict[str, Any] = {}
    optim: dict[str, Any] = {"name": chance.choice(("adamw", "adamw", "adamw", "muon", "adamw8bit"))}
    if parallel["ep"] > 1 or often(0.2):
        model |= {
            "num_experts": 4,
            "expert_dim": 64,
            "expert_routing": chance.choice(("token", "token", "expert")),
            "expert_products": chance.choice(("loop", "grouped")),
            "capacity_factor": chance.choice((0.0, 1.25)),
        }
    if optim["name"] == "adamw8bit":
        model |= {"dim": 256, "hidden_dim": 256}
    if parallel["pp"] > 1:
        parallel["schedule"] = chance.choice(
            ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble")
        )
        train["micro_batch_size"] = 1
        if often(0.3):
            parallel["stage_costs"] = [1.0, 2.0, 1.0, 1.5]
    elif often(0.5):
        train["micro_batch_size"] = chance.choice((1, 2))
    if parallel["cp"] > 1:
        parallel["cp_exchange"] = chance.choice(("gather", "ring"))
    if parallel["tp"] > 1:
        parallel |= {"sequence_parallel": often(0.7), "loss_parallel": often(0.7)}
    if parallel["dp_replicate"] > 1 and often(0.6):
        parallel["gradient_compression"] = chance.choice(("fp16", "bf16", "powersgd", "int8", "topk"))
        parallel |= {"powersgd_start": 2, "topk_ratio": 0.5}
    if parallel["dp_replicate"] > 1 and often(0.4):
        parallel["zero1"] = True
    if parallel["dp_shard"] > 1:
        parallel |= {"reshard_after_forward": often(0.6), "prefetch_blocks": chance.choice((0, 0, 2))}
        parallel |= {
            "reduce_every_microbatch": often(0.3),
            "reduce_dtype": chance.choice(("float32", "float32", "bf16")),
        }
    if often(0.3):
        parallel["cpu_offload"] = chance.choice(("optimizer", "all"))
    if often(0.3):
        parallel |= {"ddp_bucket_mb": 0.05, "gradient_as_bucket_view": often(0.5)}
    train["precision"] = chance.choice(("float32", "float32", "float32", "bf16", "fp16"))
    if often(0.15):
        train |= {"float8": chance.choice(("tensorwise", "rowwise")), "float8_emulated": True}
        parallel["float8_all_gather"] = parallel["dp_shard"] > 1 and often(0.5)
    train["activation_checkpointing"] = chance.choice(("none", "none", "full", "every_n", "selective"))
    if often(0.3):
        train |= {"compile": True, "compile_backend": "aot_eager"}
    if often(0.3):
        train["chunked_loss"] = True
    if often(0.2):
        data |= {"document_mask": True, "separator": 10}
    if often(0.2):
        model["tie_embeddings"] = True
    if often(0.2):
        data["num_workers"] = 1
    optim["fused"] = often(0.7)
    return ranks, {"parallel": parallel, "model": model, "train": train, "data": data, "optim": optim}


def alone(sections: Sections) -> Sections:
    """Settings that the single process must share with the combination."""
    rounded = {name: value for name, value in sections["train"].items() if name in (*ROUNDED, "float8_emulated")}
    return {name: sections[name] for name in COMPUTED} | {"train": {"steps": STEPS, **rounded}}


def complete(sections: Sections) -> Config:
    """The complete configuration, with frequent in-memory checkpoints and probes that sample every second step."""
    every = {"gradient_interval": 2, "local_norm_interval": 2, "fingerprint_interval": 2, "compression_interval": 2}
    return tiny(**sections, probes=every, checkpoint={"interval": 2, "memory_interval": 2, "memory_survives": False})


def attempt_of(config: Config, folder: Path, rank: int, world_size: int, attempt: int, last: int) -> RunResult:
    """Run one attempt of a rank as the worker does, with a request to stop in step `last`."""
    run = RunDir(folder)
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    result = RunResult("")
    attempt_fence.hold(run, attempt)
    recorder = LossRecorder(result, run.rank_dir(attempt, rank), rank=rank, attempt=attempt, world_size=world_size)
    install(recorder)
    try:
        training = build(
            config, resolve(config, world_size), torch.device("cpu"), recorder=recorder, with_weights=False
        )
        session = make_session(
            training,
            recorder,
            run,
            instrument(training, recorder),
            asked_to_stop=lambda: rank == 0 and recorder.step_number == last,
        )
        try:
            result.outcome = train(session)
        finally:
            training.close()
    finally:
        uninstall()
        recorder.close()
    return result


def trained(rank: int, world_size: int, sections: Sections, folder: str, stops: bool) -> dict[str, Any]:
    """Return losses and norms by step of both attempts; called by `run_ranks`."""
    config = complete(sections)
    found: dict[str, Any] = {"losses": {}, "norms": {}, "batches": {}}
    for attempt, last in enumerate((STOP_AFTER, 0) if stops else (0,)):
        result = attempt_of(config, Path(folder), rank, world_size, attempt, last)
        found["losses"] |= result.losses
        found["norms"] |= result.norms
        found["batches"] |= result.batches
    return found


def tolerances(sections: Sections) -> tuple[float, float]:
    """Relative tolerances of (losses, norms)."""
    parallel, train, optim = sections["parallel"], sections["train"], sections["optim"]
    if parallel.get("gradient_compression", "none") != "none":
        return 0.05, math.inf
    rounded = any(train.get(name) in values for name, values in ROUNDED.items())
    if rounded or parallel.get("reduce_dtype") == "bf16" or optim["name"] != "adamw":
        return 0.01, 0.1
    return 1e-4, 1e-3


def differs(sections: Sections, single: dict[str, Any], by_rank: list[dict[str, Any]]) -> str:
    """The first difference from the single process or between ranks; empty if there is none."""
    for rank, found in enumerate(by_rank):
        if found != by_rank[0]:
            return f"rank {rank} has different values than rank 0"
    for kind, tolerance in zip(("losses", "norms"), tolerances(sections), strict=True):
        expected, got = single[kind], by_rank[0][kind]
        if expected.keys() != got.keys() or len(got) != STEPS:
            return f"{kind} of steps {sorted(got)} instead of {sorted(expected)}"
        for step in sorted(got):
            if single["batches"][step] != by_rank[0]["batches"][step] and sections["train"]["precision"] == "fp16":
                break
            far = abs(got[step] - expected[step]) / abs(expected[step])
            if not math.isfinite(got[step]) or far > tolerance:
                return f"{kind} of step {step}: {got[step]:.6g} for {expected[step]:.6g} ({far:.1e} > {tolerance:g})"
    return ""


def judged(ranks: int, sections: Sections) -> tuple[str, str]:
    """(refused, equal, differs or failed; one line of detail)."""
    try:
        resolve(complete(sections), ranks)
    except (ConfigError, ValueError) as error:
        return "refused", str(error)
    with tempfile.TemporaryDirectory(prefix="layouts-") as folder:
        try:
            (single,) = run_ranks(trained, world_size=1, args=(alone(sections), f"{folder}/one", False), deadline_s=120)
            by_rank = run_ranks(trained, world_size=ranks, args=(sections, f"{folder}/many", True), deadline_s=120)
        except AssertionError as error:
            return "failed", str(error)
    difference = differs(sections, single, by_rank)
    return ("differs", difference) if difference else ("equal", "")


def shown(sections: Sections) -> str:
    """The settings that differ from the defaults."""
    usual = Config().model_dump()
    return ", ".join(
        f"{section}.{name}={value}"
        for section, settings in sections.items()
        for name, value in settings.items()
        if value != usual[section][name] and (section, name) not in (("train", "steps"), ("model", "num_layers"))
    )


def main() -> None:
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--count", type=int, default=40, help="number of trained combinations")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", metavar="SEED:NUMBER", help="only this combination, with its full message")
    options = parser.parse_args()
    if options.only:
        seed, _, number = options.only.partition(":")
        ranks, sections = draw(int(number), int(seed))
        print(ranks, shown(sections), *judged(ranks, sections), sep="\n")
        return
    rows: list[dict[str, Any]] = []
    print(markdown_head("combination", "ranks", "settings", "result"))
    number, tried = 0, 0
    while tried < options.count:
        ranks, sections = draw(number, options.seed)
        result, line = judged(ranks, sections)
        tried += result != "refused"
        last = line.strip().splitlines()[-1] if line else ""
        name = f"{options.seed}:{number}"
        print(markdown_row(name, ranks, shown(sections), f"{result} {last}".strip()), flush=True)
        rows.append({"name": name, "ranks": ranks, "settings": sections, "result": result, "line": line})
        write_json(options.json, rows)
        number += 1
    counts = Counter(row["result"] for row in rows)
    print("\n" + ", ".join(f"{result}: {count}" for result, count in sorted(counts.items())))


if __name__ == "__main__":
    from benchmarks.accuracy import random_layouts  # ranks look up `trained` by its module's name

    random_layouts.main()
