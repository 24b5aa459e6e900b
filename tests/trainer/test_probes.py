"""The probes watch and change nothing: with and without them a training computes the same bits, in every layout.

Also what they see of a pipeline in the real loop, from its first microbatch to the sum of the step's columns; and that
`rankscope plan` knows beforehand which collectives each of these layouts makes, how many and of which size.
"""

from __future__ import annotations

import gc
import os
import statistics
from collections import ChainMap, Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from probes.collectives.wrapped import install, uninstall
from probes.recorder import NullRecorder
from probes.tape.rundir import RunDir
from probes.tape_recorder import TapeRecorder
from tests.depth import usually
from tests.probes.recorded_world import rows
from tests.processes import end_group, run_ranks
from tests.trainer.layouts import tiny
from trainer.checkpoint.state import local_tensors, training_tensors
from trainer.config.config import Config
from trainer.guard.recovery import Recovery
from trainer.layout.resolve import resolve
from trainer.plan.traffic import rank_traffic
from trainer.rank.instrument import instrument, watch_experts
from trainer.rank.loop import Session, train
from trainer.training.build import build

pytestmark = pytest.mark.timeout(300)

STEPS = 4
Sections = dict[str, dict[str, Any]]


def layout(
    num_layers: int = 2, micro_batch_size: int = 0, num_experts: int = 0, float8: str = "none", **parallel: Any
) -> Sections:
    rounded = {"float8": float8, "float8_emulated": float8 != "none"}
    return {
        "model": {"num_layers": num_layers, "dim": 32, "hidden_dim": 64, "num_experts": num_experts},
        "data": {"seq_len": 16},
        "train": {"steps": STEPS, "micro_batch_size": micro_batch_size, **rounded},
        "parallel": {"dp_shard": 1, **parallel},
        "optim": {"lr": 3e-3, "warmup_steps": 2},
        "probes": {"gradient_interval": 2, "expert_interval": 2, "compression_interval": 2},
    }


LAYOUTS: dict[str, Sections] = {
    "ddp": layout(dp_replicate=4),
    "ddp, two microbatches": layout(dp_replicate=4, micro_batch_size=1),
    "ddp, zero-1, compressed": layout(dp_replicate=4, zero1=True, gradient_compression="bf16"),
    "ddp, fp8": layout(dp_replicate=4, float8="tensorwise"),
    "fsdp": layout(dp_shard=4),
    "fsdp, fp8": layout(dp_shard=4, float8="rowwise"),
    "fsdp, gathered in fp8": layout(dp_shard=4, float8="tensorwise", float8_all_gather=True),
    "tp": layout(tp=4),
    "fsdp x tp": layout(dp_shard=2, tp=2),
    "fsdp x ep": layout(dp_shard=2, ep=2, num_experts=4, micro_batch_size=1),
    "fsdp x cp": layout(dp_shard=2, cp=2),
    "ep x tp": layout(ep=2, tp=2, num_experts=4, micro_batch_size=2),
    "ep x cp": layout(ep=2, cp=2, num_experts=4),
    "hsdp": layout(dp_replicate=2, dp_shard=2),
    "1f1b": layout(pp=4, num_layers=4, micro_batch_size=1),
    "interleaved": layout(pp=4, num_layers=8, micro_batch_size=1, schedule="interleaved_1f1b"),
    "pp x fsdp": layout(pp=2, dp_shard=2, micro_batch_size=1),
    "pp x tp": layout(pp=2, tp=2, micro_batch_size=2),
}
LAYOUTS = usually(
    LAYOUTS,
    later=[
        "ddp, two microbatches", "ddp, fp8", "fsdp, fp8", "fsdp, gathered in fp8", "tp", "fsdp x cp", "ep x tp", "1f1b",
        "pp x tp", "hsdp", "fsdp",
    ],
)  # fmt: skip
APART = ["ep x tp"]
"""In processes of their own: torch keeps for DTensors which number the group of an equal mesh had, and in a new default
group it has another one, because other groups were made before."""


def run(config: Config, folder: Path, rank: int, world_size: int, *, probed: bool) -> dict[str, Any]:
    """Train as the worker does, in a default group of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    recorder = NullRecorder()
    if probed:
        recorder = TapeRecorder(folder / f"rank-{rank}", rank=rank, attempt=0, world_size=world_size)
        install(recorder)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    try:
        training = build(config, resolve(config, world_size), torch.device("cpu"), recorder=recorder)
        gradients = instrument(training, recorder)
        read = []
        real = recorder.log  # a disabled recorder is asked to log too
        recorder.log = lambda **values: (read.append(values), real(**values))[1]  # type: ignore[method-assign]
        recovery = Recovery(training, recorder, RunDir(folder), gradients)
        train(
            Session(
                training=training,
                recorder=recorder,
                recovery=recovery,
                gradients=gradients,
                experts=watch_experts(training, recorder),
            )
        )
        training.close()
        tensors = {name: value.clone() for name, value in local_tensors(training_tensors(training)).items()}
        # DDP's reducer must not hold the group's last reference: torch would join gloo's threads under the GIL.
        del training, gradients, recovery
        gc.collect()
    finally:
        uninstall()
    end_group()
    found: dict[str, Any] = {"logged": read, "tensors": tensors}
    if probed:
        recorder.close()
        found |= {table: rows(folder / f"rank-{rank}", table) for table in ("steps", "spans", "collectives", "experts")}
    return found


def with_and_without(rank: int, world_size: int, layouts: dict[str, Sections], folder: str) -> dict[str, Any]:
    os.environ["RANKSCOPE_FAIL_LOUD"] = "1"
    end_group()
    found = {}
    for number, (name, sections) in enumerate(layouts.items()):
        config = tiny(**sections)
        without = run(config, Path(folder) / f"{number}-without", rank, world_size, probed=False)
        probed = run(config, Path(folder) / f"{number}-with", rank, world_size, probed=True)
        found[name] = {"without": without, "with": probed}
    # The harness ends the group that it made.
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/end", world_size), rank=rank, world_size=world_size)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    parts = (
        {name: LAYOUTS[name] for name in LAYOUTS if name not in APART},
        {name: LAYOUTS[name] for name in APART if name in LAYOUTS},
    )
    found = [
        run_ranks(with_and_without, world_size=4, args=(part, str(tmp_path_factory.mktemp("probes"))), deadline_s=240)
        for part in parts
        if part
    ]
    return [dict(ChainMap(*parts)) for parts in zip(*found, strict=True)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_bits_with_and_without_probes(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        without, probed = rank[name]["without"], rank[name]["with"]
        # The error of compression is a probe's own: it costs a reduction, and nothing reads it.
        logged = [{key: value for key, value in row.items() if key != "compression_error"} for row in probed["logged"]]
        assert repr(logged) == repr(without["logged"])
        assert sum("loss" in values for values in probed["logged"]) == STEPS
        assert probed["tensors"].keys() == without["tensors"].keys()
        for tensor, value in without["tensors"].items():
            assert torch.equal(value, probed["tensors"][tensor]), tensor
        assert len(probed["steps"]) == STEPS
        assert probed["collectives"]


STAGES = {"1f1b": [[0], [1], [2], [3]], "interleaved": [[0, 4], [1, 5], [2, 6], [3, 7]]}


@pytest.mark.parametrize("name", [name for name in STAGES if name in LAYOUTS])
def test_each_microbatch_is_computed_sent_and_received_once(name: str, ranks: list[dict[str, Any]]) -> None:
    microbatches, last = 8, STAGES[name][-1][-1]
    for rank, stages in zip(ranks, STAGES[name], strict=True):
        spans = [span for span in rank[name]["with"]["spans"] if span["step"] == 3]
        seen = Counter((span["kind"], span["stage"], span["microbatch"]) for span in spans if span["stage"] is not None)
        expected: Counter[tuple[str, int, int | None]] = Counter()
        for stage in stages:
            expected[("reduce", stage, None)] += 1
            for number in range(microbatches):
                expected.update(
                    [
                        ("forward", stage, number),
                        ("backward", stage, number),
                        *([("recv", stage, number), ("send", stage, number)] if stage > 0 else []),
                        *([("recv", stage, number), ("send", stage, number)] if stage < last else []),
                        *([("loss", stage, number)] if stage == last else []),
                    ]
                )
        assert seen == expected
        assert all(span["end_ns"] >= span["start_ns"] for span in spans)
        assert all(0 <= span["wait_ns"] <= span["end_ns"] - span["start_ns"] for span in spans)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "pp" in LAYOUTS[name]["parallel"]])
def test_columns_of_a_step_are_the_sums_of_its_spans(name: str, ranks: list[dict[str, Any]]) -> None:
    columns = {"forward": ("forward", "loss"), "backward": ("backward", "weight", "reduce")}
    outside: list[float] = []
    for rank in ranks:
        probed = rank[name]["with"]
        for step in probed["steps"][1:]:  # in the first one torch's stages also agree on what they exchange
            spans = [span for span in probed["spans"] if span["step"] == step["step"]]
            for column, kinds in columns.items():
                own = [span for span in spans if span["kind"] in kinds]
                assert step[f"{column}_ns"] == sum(span["end_ns"] - span["start_ns"] for span in own) > 0
                assert step[f"{column}_wait_ns"] == sum(span["wait_ns"] for span in own)
                assert step[f"{column}_wait_ns"] <= step[f"{column}_ns"]
            # Waiting for a neighbour is no part of any phase, but of the step.
            phases = sum(step[f"{phase}_wait_ns"] for phase in ("data", "forward", "backward", "optimizer"))
            transfers = sum(span["wait_ns"] for span in spans if span["kind"] in ("send", "recv"))
            assert phases < step["collective_wait_ns"] < step["duration_ns"]
            outside.append((step["collective_wait_ns"] - phases) / transfers)
    # Two clocks read it, one after the other; a process that loses its core in between is 10 ms off in that step.
    assert statistics.median(outside) == pytest.approx(1, abs=0.5)


GROUPS: dict[str, set[str]] = {
    "ddp": set(),  # the only dimension of a mesh is the world itself: torch makes no second group for it
    "fsdp": set(),
    "fsdp x tp": {"dp_shard:0,2", "tp:0-1"},
    "fsdp x ep": {"dp_shard:0,2", "ep:0-1"},
    "fsdp x cp": {"cp:0-1"},
    "ep x tp": {"dp_shard+ep:0,2", "tp:0-1"},  # the experts' group is the world
    "ep x cp": {"dp_shard+cp:0-1", "ep:0,2", "cp:0-1"},
    "hsdp": {"dp_replicate:0,2", "dp_shard:0-1"},
    "pp x fsdp": {"pp:0,2", "dp_shard:0-1"},
    "pp x tp": {"pp:0,2", "tp:0-1"},
}


@pytest.mark.parametrize("name", [name for name in GROUPS if name in LAYOUTS])
def test_collectives_name_their_mesh_dimension(name: str, ranks: list[dict[str, Any]]) -> None:
    calls = [call for call in ranks[0][name]["with"]["collectives"] if call["step"] == 3]
    assert {call["process_group"] for call in calls} == {*GROUPS[name], "world:0-3"}
    assert all(call["end_ns"] is not None for call in calls)


def test_reductions_of_a_pipeline_with_fsdp_belong_to_backward(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        calls = [call for call in rank["pp x fsdp"]["with"]["collectives"] if call["op"] == "reduce_scatter"]
        assert calls
        assert {call["phase"] for call in calls} == {"reduce"}


TOO_SMALL_TO_PLAN = 256  # bytes: loss, norm and verdicts


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_plan_knows_what_will_be_sent(name: str, ranks: list[dict[str, Any]]) -> None:
    config = tiny(**LAYOUTS[name])
    plan = resolve(config, 4)
    to_experts = 0.0
    for number, rank in enumerate(ranks):
        planned: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        for call in rank_traffic(config, plan, pp_rank=plan.coordinates(number)["pp"]):
            if call.num_bytes > TOO_SMALL_TO_PLAN * call.calls:
                planned[call.op] += call.num_bytes
                calls[call.op] += call.calls
        recorded: Counter[str] = Counter()
        made: Counter[str] = Counter()
        for seen in rank[name]["with"]["collectives"]:
            if seen["step"] == 3 and seen["bytes"] > TOO_SMALL_TO_PLAN and seen["op"] != "recv":
                recorded[seen["op"]] += seen["bytes"]
                made[seen["op"]] += 1
        to_experts += recorded["all_to_all"] / max(1, planned.pop("all_to_all", 1)) / len(ranks)
        for op, num_bytes in planned.items():
            # The norms' gradients under tensor parallelism, some hundred bytes a call, are not in the plan.
            assert recorded[op] == pytest.approx(num_bytes, rel=0.1), (number, op)
            if op not in ("all_reduce", "send"):  # several p2p messages may travel in one call, DDP decides on buckets
                assert made[op] == calls[op], (number, op)
    if config.model.num_experts:  # one rank's experts get more than another's
        assert to_experts == pytest.approx(1.0, rel=0.01)


def test_the_load_of_experts_is_counted(ranks: list[dict[str, Any]]) -> None:
    """Two choices a token, of all tokens of the steps since the rows before, in each layer."""
    for rank in ranks:
        found = rank["fsdp x ep"]["with"]["experts"]
        seen: Counter[tuple[int, int]] = Counter()
        for row in found:
            seen[row["step"], row["layer"]] += row["tokens"]
        choices = 2 * sum(step["tokens"] for step in rank["fsdp x ep"]["with"]["steps"][:2])
        assert seen == dict.fromkeys(((step, layer) for step in (2, 4) for layer in (0, 1)), choices)
        assert {row["expert"] for row in found} == {0, 1, 2, 3}
        assert not any(row["dropped"] for row in found)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "ep" in LAYOUTS[name]["parallel"]])
def test_each_choice_is_counted_by_one_rank(name: str, ranks: list[dict[str, Any]]) -> None:
    seen: Counter[tuple[int, int]] = Counter()
    for row in (row for rank in ranks for row in rank[name]["with"]["experts"]):
        seen[row["step"], row["layer"]] += row["tokens"]
    choices = 2 * 2 * 8 * 16  # of each token of the sequences of two steps
    assert seen == dict.fromkeys(((step, layer) for step in (2, 4) for layer in (0, 1)), choices)


def test_the_error_of_compression_is_a_column_of_the_sampled_steps(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        errors = [step["compression_error"] for step in rank["ddp, zero-1, compressed"]["with"]["steps"]]
        assert errors[0] is errors[2] is None
        assert all(2**-11 < error < 2**-7 for error in (errors[1], errors[3]))
