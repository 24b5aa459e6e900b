"""The examples for Hugging Face's Trainer, Lightning, its Fabric and Accelerate, run with the real libraries.

Each is run without us, with us, and with us on data that holds a NaN, all at the same time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from analyzers.run.records.evaluations import evaluations
from probes.tape.rundir import RunDir
from store import Store
from tests.e2e.launched import rankscope
from tests.e2e.script_ranks import ROOT, ScriptRanks, preload
from tests.waiting import wait_for

preload("transformers.trainer", "transformers.models.llama.modeling_llama", "lightning")

STEPS = 16
WORLD = {"huggingface": 2, "lightning": 1}
POISON = 70
"""Row of the data; the step that meets it comes after the first and before the last."""


def rows(run_dir: Path, sql: str) -> list[tuple[Any, ...]]:
    with Store.open(RunDir.open(run_dir)) as store:
        return store.rows(sql)


@pytest.fixture(scope="module", params=WORLD)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of one framework: `plain.pt`, `ours.pt`, and the runs `ours/run` and `poisoned/run`."""
    yield from example_runs(request.param, WORLD[request.param], tmp_path_factory)


def example_runs(name: str, world_size: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run a framework's example three times, and yield their folder once all have ended."""
    pytest.importorskip({"huggingface": "transformers", "fabric": "lightning"}.get(name, name))
    folder = tmp_path_factory.mktemp(name)
    with ExitStack() as stack:

        def start(kind: str, *arguments: str, **variables: str) -> ScriptRanks:
            (folder / kind).mkdir()
            ranks = ScriptRanks(
                ROOT / "examples" / "frameworks" / f"train_{name}.py", "--steps", str(STEPS), *arguments,
                cwd=folder / kind, world_size=world_size, run_dir=folder / kind / "run", variables=variables,
            )  # fmt: skip
            return stack.enter_context(ranks)

        started = [
            start("plain", "--save", str(folder / "plain.pt"), RANKSCOPE_DISABLED="1"),
            start("ours", "--save", str(folder / "ours.pt")),
            start("poisoned", "--poison", str(POISON)),
        ]
        for ranks in started:
            ranks.join(150)
        yield folder


def test_results_are_bitwise_equal_without_probes(folder: Path) -> None:
    plain, ours = torch.load(folder / "plain.pt"), torch.load(folder / "ours.pt")
    assert plain.keys() == ours.keys()
    assert all(torch.equal(plain[name], ours[name]) for name in plain)
    assert not (folder / "plain" / "run").exists()


def test_every_step_and_phase_is_recorded(folder: Path) -> None:
    ranks = 1 if "lightning" in folder.name else 2
    wait_for(
        lambda: len(rows(folder / "ours" / "run", "FROM steps WHERE loss IS NOT NULL")) == STEPS * ranks,
        "all steps in the store",
    )
    found = rows(
        folder / "ours" / "run",
        "SELECT rank, count(*), count(grad_norm), count(lr), sum(committed::INT), sum((forward_ns > 0)::INT), "
        "sum((backward_ns > 0)::INT), sum((optimizer_ns > 0)::INT), max(step) FROM steps GROUP BY rank ORDER BY rank",
    )
    assert found == [(rank, *[STEPS] * 8) for rank in range(ranks)]
    ((worst,),) = rows(
        folder / "ours" / "run",
        "SELECT max((data_ns + forward_ns + backward_ns + optimizer_ns) / duration_ns) FROM steps WHERE step < 10",
    )
    assert worst <= 1.001  # a closure's forward is not counted again as the optimizer's
    if ranks > 1:
        ((reductions,),) = rows(
            folder / "ours" / "run", "SELECT count(*) FROM collectives WHERE op = 'all_reduce' AND phase = 'backward'"
        )
        assert reductions >= STEPS * ranks


def test_the_loss_of_each_evaluation_is_recorded(folder: Path) -> None:
    with Store.open(RunDir.open(folder / "ours" / "run")) as store:
        found = evaluations(store)
    assert [one.step for one in found] == [STEPS // 2, STEPS]
    assert all(one.loss > 0 for one in found)


def test_a_nan_in_the_data_is_found(folder: Path) -> None:
    done = rankscope("analyze", str(folder / "poisoned" / "run"), "--format", "json")
    found = [each for each in json.loads(done.stdout)["findings"] if each["kind"] == "non_finite"]
    assert [each["status"] for each in found] == ["fired"], done.stdout[:3000]
    assert 1 < found[0]["first_step"] < STEPS
    assert found[0]["evidence"]["phase"] == "forward"
    assert len(found[0]["ranks"]) == 1
