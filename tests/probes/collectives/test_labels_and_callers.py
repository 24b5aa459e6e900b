"""Labels of process groups, callers of calls, and the check for NaN: small and pure."""

from __future__ import annotations

import _thread
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from probes.collectives import call_records as calls_module
from probes.collectives import caller as caller_module
from probes.collectives.call_records import Calls, GroupCalls, holds_nonfinite
from probes.collectives.caller import Caller, CallerNames
from probes.collectives.groups.group_label import compact_ranks, group_label
from probes.tape_recorder import TapeRecorder
from tests.probes.recorded_world import rows


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "3"),
        ([0, 1, 2, 3], "0-3"),
        ([0, 4, 8, 12], "0-12/4"),
        ([5, 7], "5,7"),
        ([0, 1, 5], "0,1,5"),
        ([3, 2, 1, 0], "3,2,1,0"),
        ([0, 1, 2, 3, 9], "n=5@f9c5c0"),
    ],
)
def test_ranks_in_short(ranks: list[int], text: str) -> None:
    assert compact_ranks(ranks) == text


@given(st.lists(st.integers(0, 200), min_size=1, max_size=40, unique=True), st.lists(st.integers(0, 200), min_size=1))
def test_short_ranks_tell_groups_apart(first: list[int], second: list[int]) -> None:
    if compact_ranks(first) == compact_ranks(second):
        assert first == second


@pytest.mark.parametrize(
    ("description", "label"),
    [("mesh_tp", "tp:4-5"), ("default_pg", "world:4-5"), ("undefined", "group:4-5"), ("my:own", "my_own:4-5")],
)
def test_labels(description: str, label: str) -> None:
    assert group_label(description, [4, 5]) == label


class _Names:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, text: str) -> int:
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text) + 1


def test_the_caller_is_the_nearest_code_outside_torch() -> None:
    names = _Names()
    callers = CallerNames(names)
    found: list[Caller | None] = []

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    layer = Layer()
    layer.register_forward_hook(lambda *_: found.append(callers.find(1)))
    for _ in range(2):
        layer(torch.ones(1))
    layer(torch.ones(1))
    assert found[0] == found[1] != found[2]  # by line
    assert names.texts[0].startswith("tests/probes/collectives/test_labels_and_callers.py:")
    assert names.texts[0].endswith(" test_the_caller_is_the_nearest_code_outside_torch")
    assert len(names.texts) == 2


def test_each_call_path_to_a_collective_has_its_caller(tmp_path: Path) -> None:
    recorder = TapeRecorder(tmp_path, rank=0, attempt=0)
    calls, group = Calls(recorder, check_nonfinite=False), GroupCalls()

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    layer = Layer()
    layer.register_forward_hook(lambda _module, _args, x: calls.open(group, 1, [x], -1, False, False) and None)

    def wrapped(depth: int) -> None:
        if depth:
            wrapped(depth - 1)
        else:
            layer(torch.ones(1))

    for _ in range(3):
        layer(torch.ones(1))
        torch.nn.Sequential(layer)(torch.ones(1))
        wrapped(0)
        wrapped(1)
        wrapped(7)
    recorder.close()
    found = [row["caller"] for row in rows(tmp_path, "collectives")]
    assert found[:5] == found[5:10] == found[10:]
    assert len(set(found[:5])) == 3  # two lines of the loop, and the one in `wrapped` whatever is around it
    assert [name.rpartition(".")[2] for name in found[2:5]] == ["wrapped"] * 3


def test_many_kinds_of_calls_take_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "MAX_REMEMBERED", 10)
    recorder = TapeRecorder(tmp_path, rank=0, attempt=0)
    calls, group = Calls(recorder, check_nonfinite=False), GroupCalls()
    for size in range(1, 51):
        calls.open(group, 1, [torch.ones(size)], -1, False, False)
    recorder.close()
    assert len(calls._sites) <= 10
    assert [row["shape"] for row in rows(tmp_path, "collectives")] == [str(size) for size in range(1, 51)]


def test_a_call_from_a_thread_without_python_has_no_caller(tmp_path: Path) -> None:
    recorder = TapeRecorder(tmp_path, rank=0, attempt=0)
    calls, group, done = Calls(recorder, check_nonfinite=False), GroupCalls(), threading.Event()

    def made_from_outside() -> None:
        calls.open(group, 1, [torch.ones(3)], -1, False, False)
        done.set()

    # As by autograd's own threads: nothing of Python is around the function.
    _thread.start_new_thread(made_from_outside, ())
    assert done.wait(100)
    recorder.close()
    (row,) = rows(tmp_path, "collectives")
    assert (row["caller"], row["shape"]) == ("", "3")


def test_the_standard_library_is_not_the_caller() -> None:
    names = _Names()
    callers = CallerNames(names)
    found = []

    @contextlib.contextmanager
    def manager() -> object:  # type: ignore[misc]
        found.append(callers.find(1))  # contextlib called us
        yield

    with manager():
        pass
    assert found[0] is not None
    assert names.texts[found[0].number - 1].endswith(" test_the_standard_library_is_not_the_caller")


def test_the_walk_is_bounded_and_so_is_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_module, "MAX_REMEMBERED", 10)
    callers = CallerNames(_Names())

    def deep(level: int, call: Callable[[], object]) -> object:
        return call() if level == 0 else deep(level - 1, call)

    monkeypatch.setattr(caller_module, "_INTERNAL", (__file__,))
    assert deep(200, lambda: callers.find(0)) is None
    for number in range(50):
        scope: dict[str, object] = {"callers": callers}
        exec(compile("callers.find(0)", f"made_{number}.py", "exec"), scope)
    assert len(callers._internal) <= 10
    assert len(callers._known) <= 10


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_bad_value_is_found(bad: float, dtype: torch.dtype) -> None:
    tensor = torch.zeros(1000, dtype=dtype)
    assert holds_nonfinite([tensor]) == 0
    tensor[617] = bad
    assert holds_nonfinite([tensor]) == 1
    assert holds_nonfinite([torch.ones(3), tensor]) == 1


def test_unsupported_tensors_are_unknown_and_overflow_of_the_check_is_finite() -> None:
    assert holds_nonfinite([torch.ones(3, dtype=torch.int64)]) == -1
    assert holds_nonfinite([]) == -1
    assert holds_nonfinite([torch.empty(0)]) == 0
    assert holds_nonfinite([torch.full((10,), 6e4, dtype=torch.float16)]) == 0
    assert holds_nonfinite([torch.full((10,), 3e38).requires_grad_()]) == 0
    both = torch.tensor([float("inf"), -float("inf"), 1.0])
    assert holds_nonfinite([both]) == 1
