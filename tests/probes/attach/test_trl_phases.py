"""Names that TRL gives to pieces of a step, as phases. Its own class: tests/trials/e2e/test_frameworks_run.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from probes.attach.attach import attach, detach
from probes.attach.loop.trl_phases import phase_of
from probes.tape.rundir import RunDir
from store import Store


class ProfilingContext:
    """Has the name and the two methods of TRL's."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[str] = []

    def __enter__(self) -> ProfilingContext:
        self.calls.append("enter")
        return self

    def __exit__(self, *error: object) -> bool:
        self.calls.append("exit")
        return False


ENTER, EXIT = ProfilingContext.__enter__, ProfilingContext.__exit__


@pytest.fixture
def trl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RANKSCOPE_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    module = ModuleType("trl.extras.profiling")
    module.ProfilingContext = ProfilingContext  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trl.extras.profiling", module)
    yield
    detach()
    assert (ProfilingContext.__enter__, ProfilingContext.__exit__) == (ENTER, EXIT)


def rows(run_dir: Path, sql: str) -> list[tuple[Any, ...]]:
    with Store.open(RunDir(run_dir)) as store:
        return store.rows(sql)


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("GRPOTrainer.transformers.generate", "generation"),
        ("VLLMGeneration.generate", "generation"),
        ("RLOOTrainer._calculate_rewards", "reward"),
        ("GRPOTrainer._get_per_token_logps_and_entropies", "log_probs"),
        ("GRPOTrainer.sync_weights", "sync_weights"),
        ("GRPOTrainer.compute_loss", ""),
        ("GRPOTrainer._prepare_inputs", ""),
        ("", ""),
    ],
)
def test_pieces_have_the_names_of_phases(name: str, phase: str) -> None:
    assert phase_of(name) == phase


@pytest.mark.usefixtures("trl")
def test_pieces_of_a_step_become_spans_of_it(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer, run_dir=tmp_path / "run", watch=False)
    contexts = []
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        for name in ("T.generate", "T._calculate_rewards", "T.compute_loss"):
            with ProfilingContext(name) as context, ProfilingContext("VLLMGeneration.generate"):
                contexts.append(context)
        with ProfilingContext("T._get_per_token_logps"):  # with gradients: the forward pass
            pass
        with torch.no_grad(), ProfilingContext("T._get_per_token_logps"):
            pass
        optimizer.step()
    detach()
    assert all(context.calls == ["enter", "exit"] for context in contexts)
    found = rows(
        tmp_path / "run",
        "SELECT kind, count(*), count(end_ns), count(DISTINCT step) FROM spans "
        "WHERE kind IN ('generation', 'reward', 'log_probs', 'compute_loss') GROUP BY kind ORDER BY kind",
    )
    # Around the inner `generate`: itself (one span), the rewards and the loss (one each).
    assert found == [("generation", 9, 9, 3), ("log_probs", 3, 3, 3), ("reward", 3, 3, 3)]


@pytest.mark.usefixtures("trl")
def test_an_error_inside_a_piece_ends_its_span(tmp_path: Path) -> None:
    attach(run_dir=tmp_path / "run", watch=False)
    with pytest.raises(ValueError, match="no reward"), ProfilingContext("T._calculate_rewards"):
        raise ValueError("no reward")
    detach()
    assert rows(tmp_path / "run", "SELECT kind, end_ns IS NOT NULL FROM spans") == [("reward", True)]
