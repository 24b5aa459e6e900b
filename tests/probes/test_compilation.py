"""torch.compile at work is on the tape while it lasts, and the watch gives it the time that it takes."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.callback import callback_handler

from analyzers.run.calls.snapshot import SNAPSHOT_EVENTS, AttemptView, take_snapshot
from analyzers.run.live.stall_limits import limit_s, stalled_s
from analyzers.run.policy import StallPolicy
from analyzers.run.records.event_log import EventLog
from probes.attach.attach import attach, detach
from probes.attach.auto_attach import auto_attach
from probes.tape.rundir import RunDir
from store import Store


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    detach()
    torch._dynamo.reset()


class Looking:
    """A compiler that looks at the run's records while it is at work, and leaves the graph as it is."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.seen: list[AttemptView] = []
        self.open_spans: list[tuple[Any, ...]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        with Store.open(RunDir(self.run_dir)) as store:
            self.seen.append(take_snapshot(store, 0, EventLog.load(store, SNAPSHOT_EVENTS)))
            self.open_spans = store.rows("SELECT kind FROM spans WHERE end_ns IS NULL ORDER BY start_ns")
        return graph.forward


def test_a_compilation_is_a_span_and_no_hang_while_it_lasts_less_than_its_limit(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    looking = Looking(tmp_path / "run")
    layer = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend=looking)

    class Outer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return model(layer(x))

    attach(outer := Outer(), optimizer, run_dir=tmp_path / "run", watch=False)
    for _ in range(3):
        outer(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    detach()

    (view,) = looking.seen
    assert looking.open_spans == [("forward",), ("compile",)]
    policy = StallPolicy()
    assert limit_s(view, policy) == policy.compile_s
    assert stalled_s(view, view.last_ns + int(500e9), policy) is None
    assert stalled_s(view, view.last_ns + int(601e9), policy) == pytest.approx(601)
    with Store.open(RunDir(tmp_path / "run")) as store:
        spans = store.rows("SELECT step, end_ns > start_ns FROM spans WHERE kind = 'compile'")
        forward = store.rows("SELECT count(*), bool_and(end_ns IS NOT NULL) FROM spans WHERE kind = 'forward'")
    assert spans == [(1, True)]
    assert forward == [(3, True)]


def test_what_is_compiled_after_a_reset_is_recorded_and_nothing_is_left_behind(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layer = torch.compile(nn.ReLU(), backend="eager")
    before = (list(callback_handler.start_callbacks), list(callback_handler.end_callbacks))
    attach(model, optimizer, run_dir=tmp_path / "run", watch=False)
    for step in range(4):
        if step == 2:
            torch._dynamo.reset()
        model(torch.randn(2, 4)).sum().backward()
        layer(torch.randn(2, 4))
        optimizer.step()
    detach()
    assert (callback_handler.start_callbacks, callback_handler.end_callbacks) == before
    with Store.open(RunDir(tmp_path / "run")) as store:
        assert store.rows("SELECT step FROM spans WHERE kind = 'compile'") == [(1,), (3,)]


def test_a_compilation_that_fails_ends_its_span(tmp_path: Path) -> None:
    def broken(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        raise ValueError("no")

    model = nn.Linear(4, 1)
    attach(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path / "run", watch=False)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        torch.compile(nn.ReLU(), backend=broken)(torch.randn(2))
    detach()
    with Store.open(RunDir(tmp_path / "run")) as store:
        assert store.rows("SELECT end_ns IS NOT NULL FROM spans WHERE kind = 'compile'") == [(True,)]


def test_a_compiled_function_may_clip_the_gradients_without_a_graph_break(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    attach(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path / "run", watch=False)
    model(torch.ones(2, 4)).sum().backward()

    @torch.compile(backend="eager", fullgraph=True)
    def clip() -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    assert clip() > 1.0


def test_the_backward_pass_of_a_compiled_step_is_recorded_and_none_of_our_code_is_compiled(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    attach(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path / "run", watch=False)
    compiled: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compiled.extend(node.stack_trace or "" for node in graph.graph.nodes)
        return graph.forward

    @torch.compile(backend=backend)
    def gradients(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss.detach() * 2

    for _ in range(2):
        double = gradients(torch.ones(2, 4))
        optimizer.step()
    detach()
    with Store.open(RunDir(tmp_path / "run")) as store:
        assert store.rows("SELECT step FROM spans WHERE kind = 'backward' ORDER BY step") == [(1,), (2,)]
        assert store.rows("SELECT loss FROM steps WHERE step = 2") == [(pytest.approx(double.item() / 2),)]
    assert compiled
    assert not [stack for stack in compiled if "/probes/attach/" in stack]


class Subtracting(torch.optim.Optimizer):
    """An optimizer that the compiler can trace as one graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for one in self.param_groups[0]["params"]:
            one.sub_(one.grad, alpha=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: Any, *, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        step()


def test_a_compiled_step_of_an_optimizer_is_recorded_and_keeps_its_graphs(tmp_path: Path) -> None:
    model, graphs = nn.Linear(4, 1), []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append([node.stack_trace or "" for node in graph.graph.nodes])
        return graph.forward

    attach(model, optimizer := torch.optim.Adam(model.parameters()), run_dir=tmp_path / "run", watch=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo does not know how to trace")
        train(model, optimizer, torch.compile(optimizer.step, backend=backend), steps=3)
    detach()
    (graph,) = graphs
    assert not [stack for stack in graph if "/probes/" in stack]
    with Store.open(RunDir(tmp_path / "run")) as store:
        assert store.rows("SELECT step FROM spans WHERE kind = 'optimizer' ORDER BY step") == [(1,), (2,), (3,)]


@pytest.mark.parametrize("is_found", [False, True])
def test_a_step_that_must_be_one_graph_is_compiled_and_the_loop_has_steps(tmp_path: Path, is_found: bool) -> None:
    model = nn.Linear(4, 1)
    optimizer = Subtracting(model)
    if is_found:
        auto_attach(run_dir=tmp_path / "run", watch=False)
    else:
        attach(model, optimizer, run_dir=tmp_path / "run", watch=False)
    before = model.bias.item()
    train(model, optimizer, torch.compile(optimizer.step, backend="eager", fullgraph=True), steps=5)
    detach()
    assert model.bias.item() == pytest.approx(before - 5 * 0.1 * 2)
    with Store.open(RunDir(tmp_path / "run")) as store:
        # if `attach` knew the optimizer, the hooks were expected to show the first update, and two passes are one step
        assert store.rows("SELECT max(step) FROM steps") == [(5 if is_found else 4,)]


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    with Store.open(RunDir(run_dir)) as store:
        return [event.detail | {"rank": event.rank} for event in EventLog.load(store, (kind,)).of(kind)]


def test_what_is_compiled_again_says_which_guard_failed_and_where(tmp_path: Path) -> None:
    def scaled(x: torch.Tensor, factor: int) -> torch.Tensor:
        return x * factor

    model = nn.Linear(4, 1)
    attach(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path / "run", watch=False)
    compiled = torch.compile(scaled, backend="eager", dynamic=False)
    for size in (2, 2, 3, 3):
        compiled(torch.ones(size), 2)
    detach()
    (found,) = events(tmp_path / "run", "recompile")
    assert found["rank"] == 0
    assert found["function"] == "scaled"
    assert (found["file"], found["line"]) == (__file__, scaled.__code__.co_firstlineno)
    assert "size mismatch" in found["guard"]


def test_a_broken_graph_says_the_line_and_the_reason_once(tmp_path: Path) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    model = nn.Linear(4, 1)
    attach(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path / "run", watch=False)
    compiled = torch.compile(broken, backend="eager", dynamic=False)
    for size in (2, 3):
        compiled(torch.ones(size))
    detach()
    (found,) = events(tmp_path / "run", "graph_break")
    assert found["function"] == "broken"
    assert (found["file"], found["line"]) == (__file__, broken.__code__.co_firstlineno + 2)
    assert "graph_break" in found["reason"]


def test_the_probe_never_imports_the_compiler() -> None:
    code = (
        "import sys, torch\n"
        "from probes.compilation import CompileProbe\n"
        "from probes.tape_recorder import TapeRecorder\n"
        "import pathlib, tempfile\n"
        "probe = CompileProbe(TapeRecorder(pathlib.Path(tempfile.mkdtemp()), rank=0, attempt=0))\n"
        "probe.hook(); probe.remove()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
