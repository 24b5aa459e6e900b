"""Attached to a loop in this process: what becomes a step and a phase, and that nothing is left behind."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.nn.utils import clip_grad
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, TensorDataset, dataloader

from probes.attach.attach import attach, current, detach, log, phase
from probes.attach.auto_attach import auto_attach
from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from store import Store


@pytest.fixture(autouse=True)
def left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test does, it leaves no hook."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RANKSCOPE_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    before = places()
    yield
    detach()
    assert places() == before
    assert current() is None


def places() -> list[Any]:
    """All that `attach` puts something into."""
    return [
        torch.autograd.backward,
        dataloader._BaseDataLoaderIter.__next__,
        clip_grad._clip_grads_with_norm_,
        nn.utils.clip_grads_with_norm_,
        torch.save,
        torch.jit.script,
        torch.cuda.make_graphed_callables,
        serialize_file(),
        c10d.ProcessGroup,
        sys.excepthook,
    ]


def serialize_file() -> Any:
    """What `safetensors.torch.save_file` calls."""
    return safetensors.torch.serialize_file


class Loop:
    """A model, its optimizer and its data."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = DataLoader(TensorDataset(torch.randn(12, 4), torch.randn(12, 1)), batch_size=4)

    def epoch(self, backwards: int = 1) -> None:
        for x, y in self.loader:
            for _ in range(backwards):
                loss = (self.model(x) - y).square().mean() / backwards
                loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def rows(run_dir: Path, sql: str) -> list[tuple[Any, ...]]:
    with Store.open(RunDir(run_dir)) as store:
        return store.rows(sql)


def test_accumulated_backwards_are_one_step_and_an_epochs_end_begins_none(tmp_path: Path) -> None:
    loop = Loop()
    attach(loop.model, loop.optimizer, run_dir=tmp_path / "run", watch=False)
    loop.epoch(backwards=2)
    with torch.no_grad():
        loop.model(torch.zeros(1, 4))  # an evaluation, still of the third step
    loop.epoch(backwards=2)
    detach()
    found = rows(tmp_path / "run", "SELECT step, evaluate_ns > 0, committed, lr FROM steps ORDER BY step")
    assert found == [(step, step == 3, True, 0.1) for step in range(1, 7)]
    kinds = rows(tmp_path / "run", "SELECT kind, count(*) FROM spans GROUP BY kind ORDER BY kind")
    # 8 fetches: two of them found the end of an epoch.
    assert kinds == [("backward", 12), ("data", 8), ("evaluate", 1), ("forward", 12), ("optimizer", 6)]
    assert rows(tmp_path / "run", "SELECT max(step) FROM spans WHERE kind = 'data'") == [(7,)]


def test_loss_and_norm_are_recorded_without_logging(tmp_path: Path) -> None:
    loop = Loop()
    attach(loop.model, loop.optimizer, run_dir=tmp_path / "run", watch=False)
    x, y = torch.ones(1, 4), torch.zeros(1, 1)
    loss = (loop.model(x) - y).square().mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)
    loop.optimizer.step()
    detach()
    ((own, seen),) = rows(tmp_path / "run", "SELECT loss, grad_norm FROM steps")
    assert own == loss.item()
    assert seen == pytest.approx(norm.item())  # before it was clipped


@pytest.mark.parametrize("by", ["two lines", "a callback"])
def test_a_script_that_attaches_under_our_launcher_has_every_forward_once(tmp_path: Path, by: str) -> None:
    loop = Loop()
    auto_attach(run_dir=tmp_path / "run", watch=False)
    if by == "two lines":
        attach(loop.model, loop.optimizer, gradient_interval=1)
    else:
        auto_attach(gradient_interval=1)
    loop.epoch()
    detach()
    found = rows(
        tmp_path / "run", "SELECT step, count(*) FROM spans WHERE kind = 'forward' GROUP BY step ORDER BY step"
    )
    assert found == [(1, 1), (2, 1), (3, 1)]
    looked_at = rows(
        tmp_path / "run", "SELECT parameter, count(*) FROM gradients GROUP BY parameter ORDER BY parameter"
    )
    assert looked_at == [("bias", 3), ("weight", 3)]


def test_a_pass_without_computation_is_not_a_step(tmp_path: Path) -> None:
    """As libraries count the operations of a model before they train it."""
    auto_attach(run_dir=tmp_path / "run", watch=False)
    with torch.device("meta"):
        nn.Linear(4, 1)(torch.ones(2, 4)).mean().backward()
    loop = Loop()
    loop.epoch()
    detach()
    found = rows(tmp_path / "run", "SELECT step, loss IS NOT NULL, forward_ns > 0 FROM steps ORDER BY step")
    assert found == [(1, True, True), (2, True, True), (3, True, True)]


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_a_scripted_class_finds_the_names_of_its_module(tmp_path: Path) -> None:
    loop = Loop()
    attach(loop.model, loop.optimizer, run_dir=tmp_path / "run", watch=False)

    @torch.jit.script
    class Doubles:
        def __init__(self) -> None:
            self.x = doubled(torch.ones(1))

    assert Doubles().x.item() == 2


def test_cuda_graphs_accept_a_model_with_our_hooks(tmp_path: Path) -> None:
    """torch refuses modules with hooks, which it looks for before its other conditions and the device."""
    loop = Loop()
    attach(loop.model, loop.optimizer, run_dir=tmp_path / "run", watch=False)
    with pytest.raises(AssertionError, match="only Tensors"):
        torch.cuda.make_graphed_callables(loop.model, (1.0,))


def test_detach_leaves_no_hook_of_torch_behind(tmp_path: Path) -> None:
    """Where no step was taken too: torch warns of global hooks on modules when a model is compiled."""
    before = len(_global_forward_pre_hooks), len(_global_optimizer_pre_hooks)
    auto_attach(run_dir=tmp_path / "run", watch=False)
    assert (len(_global_forward_pre_hooks), len(_global_optimizer_pre_hooks)) != before
    detach()
    assert (len(_global_forward_pre_hooks), len(_global_optimizer_pre_hooks)) == before


def test_a_phase_named_by_the_loop_is_recorded_only_when_attached(tmp_path: Path) -> None:
    loop = Loop()
    with phase("generation"):
        pass
    attach(loop.model, loop.optimizer, run_dir=tmp_path / "run", watch=False)
    for x, y in loop.loader:
        with phase("generation"):
            pass
        (loop.model(x) - y).square().mean().backward()
        loop.optimizer.step()
    detach()
    found = rows(tmp_path / "run", "SELECT step, count(end_ns) FROM spans WHERE kind = 'generation' GROUP BY step")
    assert sorted(found) == [(1, 1), (2, 1), (3, 1)]


def test_values_logged_after_the_update_belong_to_its_step(tmp_path: Path) -> None:
    loop = Loop()
    attach(loop.model, loop.optimizer, run_dir=tmp_path / "run", watch=False)
    for number, (x, y) in enumerate(loop.loader):
        (loop.model(x) - y).square().mean().backward()
        loop.optimizer.step()
        log(loss=torch.tensor(float(number)), tokens=7, accuracy=number / 2, reward=torch.tensor(float("nan")))
    detach()
    assert rows(tmp_path / "run", "SELECT loss, tokens FROM steps ORDER BY step") == [(0.0, 7), (1.0, 7), (2.0, 7)]
    assert rows(tmp_path / "run", "SELECT step, value FROM scalars WHERE name = 'accuracy' ORDER BY step") == [
        (1, 0.0), (2, 0.5), (3, 1.0),
    ]  # fmt: skip
    assert rows(tmp_path / "run", "SELECT count(*) FROM scalars WHERE name = 'reward' AND isnan(value)") == [(3,)]


def test_a_loop_that_makes_up_names_does_not_fill_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("probes.step_scalars.MAX_NAMES", 3)
    loop = Loop()
    attach(loop.model, loop.optimizer, run_dir=tmp_path / "run", watch=False)
    for number, (x, y) in enumerate(loop.loader):
        (loop.model(x) - y).square().mean().backward()
        log(kept=1.0, **{f"sample_{number}_{part}": 0.0 for part in range(3)})
        loop.optimizer.step()
    detach()
    assert rows(tmp_path / "run", "SELECT DISTINCT name FROM scalars ORDER BY name") == [
        ("kept",), ("sample_0_0",), ("sample_0_1",),
    ]  # fmt: skip
    told = [record.message for record in caplog.records if record.name == "rankscope.probes"]
    assert [message.count("sample_0_2") for message in told] == [1]


def test_the_loop_may_say_itself_what_a_step_is(tmp_path: Path) -> None:
    loop = Loop()
    recorder = attach(loop.model, loop.optimizer, run_dir=tmp_path / "run", watch=False)
    for _ in range(2):
        with recorder.step():
            loop.epoch()
            with recorder.phase("my own phase"):
                pass
    detach()
    assert rows(tmp_path / "run", "SELECT step FROM steps ORDER BY step") == [(1,), (2,)]
    assert rows(tmp_path / "run", "SELECT count(*) FROM spans WHERE kind = 'my own phase'") == [(2,)]


def test_a_wrapped_optimizer_and_a_second_attach_count_once(tmp_path: Path) -> None:
    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def step(self) -> None:
            self.optimizer.step()

    loop = Loop()
    first = attach(loop.model, Wrapper(loop.optimizer), run_dir=tmp_path / "run", watch=False)
    assert attach(loop.model, loop.optimizer) is first
    loop.epoch()
    detach()
    assert rows(tmp_path / "run", "SELECT count(*) FROM spans WHERE kind = 'optimizer'") == [(3,)]
    assert not loop.model._forward_hooks
    assert not loop.optimizer._optimizer_step_pre_hooks


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    loop = Loop()
    assert attach(loop.model, loop.optimizer, run_dir=tmp_path, watch=False).run_dir is None
    loop.epoch()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert "holds something that is not a run" in caplog.text


def test_a_folder_that_cannot_be_made_is_named_with_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    loop = Loop()
    assert attach(loop.model, loop.optimizer, run_dir=tmp_path / "file" / "run", watch=False).run_dir is None
    (line,) = [message for message in caplog.messages if "does not record" in message]
    assert line == f"rankscope does not record: {tmp_path}/file/run: Not a directory; choose another run_dir"


def test_attach_does_nothing_when_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKSCOPE_DISABLED", "1")
    loop = Loop()
    recorder = attach(loop.model, loop.optimizer, run_dir=tmp_path / "run")
    with recorder.step(), recorder.phase("forward"):
        loop.epoch()
    log(loss=1.0)
    assert not (tmp_path / "run").exists()


def test_a_user_event_may_have_any_field(tmp_path: Path) -> None:
    attached = attach(run_dir=tmp_path / "run", watch=False)
    try:
        attached.event("settings", kind="cosine", rank=8, lr=0.1)
    finally:
        detach()
    events = read_events(RunDir(tmp_path / "run").rank_dir(0, 0) / "events.jsonl")[0]
    (found,) = [event for event in events if event["kind"] == "settings"]
    assert (found["kind_"], found["rank_"], found["lr"], found["rank"]) == ("cosine", 8, 0.1, 0)


@pytest.mark.parametrize("library", ["torch", "safetensors", "dcp"])
def test_saves_are_the_phase_checkpoint(tmp_path: Path, library: str) -> None:
    loop = Loop()
    attach(loop.model, loop.optimizer, run_dir=tmp_path / "run", watch=False)
    loop.epoch()
    state = loop.model.state_dict()
    if library == "torch":
        torch.save(state, tmp_path / "state.pt")
    elif library == "safetensors":
        safetensors.torch.save_file(state, tmp_path / "state.safetensors")
    else:
        dcp.save(state, checkpoint_id=tmp_path / "state")
    loop.epoch()
    detach()
    assert rows(tmp_path / "run", "SELECT step FROM steps WHERE checkpoint_ns > 0") == [(3,)]
    assert rows(tmp_path / "run", "SELECT count(*) FROM spans WHERE kind = 'checkpoint'") == [(1,)]


def test_attaching_again_records_every_collective_and_detach_restores_the_group_of_torch(
    tmp_path: Path,
) -> None:
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which sets a hook
    try:
        for attempt in range(2):
            loop = Loop()
            attach(loop.model, loop.optimizer, run_dir=tmp_path / "run", watch=False)
            dist.all_reduce(torch.ones(1))
            loop.epoch()
            detach()
            assert type(dist.group.WORLD) is c10d.ProcessGroup
            dist.all_reduce(torch.ones(1))
            found = rows(tmp_path / "run", f"SELECT count(*) FROM collectives WHERE attempt = {attempt}")
            assert found == [(1,)]
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
    assert rows(tmp_path / "run", "SELECT attempt, count(*) FROM steps GROUP BY attempt ORDER BY attempt") == [
        (0, 3),
        (1, 3),
    ]


def test_an_evaluation_belongs_to_the_step_before_it(tmp_path: Path) -> None:
    loop = Loop()
    attach(loop.model, loop.optimizer, run_dir=tmp_path / "run", watch=False)
    for _ in range(2):
        loop.epoch()
        loop.model.eval()
        with torch.no_grad():
            for x, _ in loop.loader:
                loop.model(x)
        loop.model.train()
    detach()
    columns = "step, evaluate_ns > 0, data_ns + forward_ns + backward_ns + optimizer_ns + evaluate_ns <= duration_ns"
    found = rows(tmp_path / "run", f"SELECT {columns} FROM steps ORDER BY step")
    assert found == [(step, step % 3 == 0, True) for step in range(1, 7)]


def test_a_last_evaluation_in_training_mode_with_gradients_is_not_a_step(tmp_path: Path) -> None:
    loop = Loop()
    attach(loop.model, loop.optimizer, run_dir=tmp_path / "run", watch=False)
    loop.epoch()
    for x, _ in Loop().loader:
        loop.model(x)
    detach()
    assert rows(tmp_path / "run", "SELECT step, loss IS NOT NULL FROM steps ORDER BY step") == [
        (1, True),
        (2, True),
        (3, True),
    ]


def test_an_evaluation_through_the_unwrapped_model_is_recorded(tmp_path: Path) -> None:
    """As the trainers of libraries evaluate: what reduces gradients stays in the mode of training."""
    held_out, hook = Loop().loader, sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        loop = Loop()
        inner, loop.model = loop.model, nn.parallel.DistributedDataParallel(loop.model)  # type: ignore[assignment]
        attach(loop.model, loop.optimizer, run_dir=tmp_path / "run", watch=False)
        for _ in range(2):
            loop.epoch()
            inner.eval()
            for x, _ in held_out:
                with torch.no_grad():
                    inner(x)
            inner.train()
        detach()
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # the group has set one
    found = rows(tmp_path / "run", "SELECT step, evaluate_ns > 0, forward_ns > 0 FROM steps ORDER BY step")
    assert found == [(step, step % 3 == 0, True) for step in range(1, 7)]
    assert rows(tmp_path / "run", "SELECT count(*) FROM spans WHERE kind = 'forward'") == [(6,)]


@pytest.mark.parametrize("divides", [True, False])
@pytest.mark.parametrize("scaled", [1.0, 8.0])
def test_micro_losses_are_one_loss_whether_the_loop_divides_them_or_not(
    tmp_path: Path, divides: bool, scaled: float
) -> None:
    loop = Loop()
    attach(loop.model, loop.optimizer, run_dir=tmp_path / "run", watch=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=scaled, enabled=scaled != 1)
    seen = []
    for x, y in loop.loader:
        loss = (loop.model(x) - y).square().mean()
        seen.append(loss.item())
        scaler.scale(loss / 3 if divides else loss).backward()
    scaler.step(loop.optimizer)
    detach()
    assert rows(tmp_path / "run", "SELECT loss FROM steps") == [(pytest.approx(sum(seen) / 3),)]


def test_two_losses_of_one_forward_pass_add_up(tmp_path: Path) -> None:
    loop = Loop()
    attach(loop.model, loop.optimizer, run_dir=tmp_path / "run", watch=False)
    out = loop.model(torch.ones(2, 4))
    first, second = out.square().mean(), out.abs().mean()
    first.backward(retain_graph=True)
    second.backward()
    loop.optimizer.step()
    detach()
    assert rows(tmp_path / "run", "SELECT loss FROM steps") == [(pytest.approx(first.item() + second.item()),)]


def test_a_library_that_is_imported_to_save_is_seen_and_imported_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "safetensors"]:
        monkeypatch.delitem(sys.modules, name)
    finders = list(sys.meta_path)
    loop = Loop()
    attach(loop.model, loop.optimizer, run_dir=tmp_path / "run", watch=False)
    loop.epoch()
    loaded = importlib.import_module("safetensors.torch")
    assert loaded.__spec__ is not None
    assert loaded.__spec__.loader is loaded.__loader__
    assert type(loaded.__loader__).__module__.startswith("importlib") or "frozen" in type(loaded.__loader__).__module__
    loaded.save_file({"w": torch.ones(2)}, str(tmp_path / "w.safetensors"))
    detach()
    assert sys.meta_path == finders
    assert rows(tmp_path / "run", "SELECT count(*) FROM spans WHERE kind = 'checkpoint'") == [(1,)]


def test_a_deleted_working_folder_does_not_stop_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    loop = Loop()
    attach(loop.model, loop.optimizer, run_dir=tmp_path / "run", watch=False)
    loop.epoch()
    detach()
    monkeypatch.chdir(tmp_path)
    assert rows(tmp_path / "run", "SELECT count(*) FROM steps") == [(3,)]
