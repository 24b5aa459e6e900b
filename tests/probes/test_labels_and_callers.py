"""Labels of process groups, callers of calls, and the check for NaN: small and pure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from probes import caller as caller_module
from probes.caller import CallerNames
from probes.finite import holds_nonfinite
from probes.group_label import compact_ranks, group_label


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
    found: list[int] = []

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    layer = Layer()
    layer.register_forward_hook(lambda *_: found.append(callers(1)))
    for _ in range(2):
        layer(torch.ones(1))
    layer(torch.ones(1))
    assert found[0] == found[1] != found[2]  # by line
    assert names.texts[0].startswith("tests/probes/test_labels_and_callers.py:")
    assert names.texts[0].endswith(" test_the_caller_is_the_nearest_code_outside_torch")
    assert len(names.texts) == 2


def test_the_same_place_in_torch_has_a_caller_for_each_way_to_it() -> None:
    names = _Names()
    callers = CallerNames(names)

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    layer, found = Layer(), []
    layer.register_forward_hook(lambda *_: found.append(callers(1)))

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
    lines = [names.texts[number - 1].split(":")[1] for number in found]
    assert lines[:5] == lines[5:10] == lines[10:]
    assert len(set(lines[:5])) == 3  # two lines of the loop, and the one in `wrapped` whatever is around it


def test_the_standard_library_is_no_caller() -> None:
    names = _Names()
    callers = CallerNames(names)
    found = []

    @contextlib.contextmanager
    def manager() -> object:  # type: ignore[misc]
        found.append(callers(1))  # contextlib called us
        yield

    with manager():
        pass
    assert names.texts[found[0] - 1].endswith(" test_the_standard_library_is_no_caller")


def test_the_walk_is_bounded_and_so_is_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_module, "MAX_REMEMBERED", 10)
    callers = CallerNames(_Names())

    def deep(level: int, call: Callable[[], int]) -> int:
        return call() if level == 0 else deep(level - 1, call)

    monkeypatch.setattr(caller_module, "_INTERNAL", (__file__,))
    assert deep(200, lambda: callers(0)) == 0
    for number in range(50):
        scope: dict[str, object] = {"callers": callers}
        exec(compile("callers(0)", f"made_{number}.py", "exec"), scope)
    assert len(callers._guesses) <= 10
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


def test_what_cannot_be_asked_is_unknown_and_overflow_is_finite() -> None:
    assert holds_nonfinite([torch.ones(3, dtype=torch.int64)]) == -1
    assert holds_nonfinite([]) == -1
    assert holds_nonfinite([torch.empty(0)]) == 0
    assert holds_nonfinite([torch.full((10,), 6e4, dtype=torch.float16)]) == 0
    assert holds_nonfinite([torch.full((10,), 3e38).requires_grad_()]) == 0
    both = torch.tensor([float("inf"), -float("inf"), 1.0])
    assert holds_nonfinite([both]) == 1
