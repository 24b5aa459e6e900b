"""The step in which a loop fails, by where in its iteration it does: among fetches, updates, evaluations."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from analyzers.finding import Finding
from analyzers.run.policy import StallPolicy
from probes.attach.attach import Attached, attach, current, detach
from probes.tape.rundir import RunDir
from store import Store
from tests.analyzers.judged import judged_losses

FAILS_AT = 4
"""The iteration in which each loop fails, counted from 1."""
Fail = Callable[[], None]


def fail() -> None:
    raise ValueError("a bad sample")


class Samples(Dataset[torch.Tensor]):
    """Samples of which one cannot be read."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.bad:
            fail()
        return torch.ones(4)


class Parts:
    """What the loops are made of."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def update(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.optimizer.step()

    def evaluate(self, bad: int = -1) -> None:
        self.model.eval()
        with torch.no_grad():
            for batch in DataLoader(Samples(bad), batch_size=2):
                self.model(batch)
        self.model.train()


def in_the_fetch(parts: Parts) -> None:
    for batch in DataLoader(Samples(bad=3), batch_size=1):
        parts.update(batch)


def in_the_fetch_of_a_microbatch(parts: Parts) -> None:
    for index, batch in enumerate(DataLoader(Samples(bad=7), batch_size=1)):
        parts.model(batch).mean().backward()
        if index % 2:
            parts.optimizer.step()


def in_the_second_loader(parts: Parts) -> None:
    first, second = DataLoader(Samples(), batch_size=1), DataLoader(Samples(bad=3), batch_size=1)
    for one, other in zip(first, second, strict=True):
        parts.update(one + other)


def between_batch_and_forward(parts: Parts) -> None:
    for index, batch in enumerate(DataLoader(Samples(), batch_size=1), start=1):
        if index == FAILS_AT:
            fail()
        parts.update(batch)


def after_an_evaluation(parts: Parts) -> None:
    """As a library evaluates: the mode is set back by the next step."""
    batches = iter(DataLoader(Samples(bad=3), batch_size=1))
    for index in range(16):
        batch = next(batches)
        parts.model.train()
        parts.update(batch)
        if index == FAILS_AT - 2:
            parts.evaluate()
            parts.model.eval()


def in_a_batch_made_by_hand(parts: Parts) -> None:
    for index in range(1, 16):
        batch = torch.ones(4) if index < FAILS_AT else Samples(bad=0)[0]
        parts.update(batch)


def in_code_after_the_update(parts: Parts) -> None:
    for index in range(1, 16):
        parts.update(torch.ones(4))
        if index == FAILS_AT:
            fail()


def between_epochs(parts: Parts) -> None:
    for epoch in range(1, 16):
        if epoch == FAILS_AT:
            fail()
        for batch in DataLoader(Samples(), batch_size=16):
            parts.update(batch)


def in_an_evaluation(parts: Parts) -> None:
    for index in range(1, 16):
        parts.update(torch.ones(4))
        parts.evaluate(bad=5 if index == FAILS_AT else -1)


def with_another_error(parts: Parts) -> None:
    for index in range(1, 16):
        try:
            batch = torch.ones(4) if index < FAILS_AT else Samples(bad=0)[0]
        except ValueError as error:
            raise RuntimeError("no batch") from error
        parts.update(batch)


LOOPS = (
    in_the_fetch, in_the_fetch_of_a_microbatch, in_the_second_loader, between_batch_and_forward, after_an_evaluation,
    in_a_batch_made_by_hand, in_code_after_the_update, between_epochs, in_an_evaluation, with_another_error,
)  # fmt: skip


PLACES = {
    in_the_fetch: "in data",
    in_the_fetch_of_a_microbatch: "in data",
    in_the_second_loader: "in data",
    between_batch_and_forward: "in user code after data",
    after_an_evaluation: "in data",
    in_an_evaluation: "in data",
    between_epochs: "in user code after data",
    in_a_batch_made_by_hand: "in user code",
    with_another_error: "in user code",
}


@pytest.fixture
def attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Attached, Parts]]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RANKSCOPE_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    parts = Parts()
    yield attach(parts.model, parts.optimizer, run_dir=tmp_path / "run", watch=False), parts
    detach()
    assert current() is None


def judged(attached: Attached) -> Finding:
    assert attached.run_dir is not None
    with Store.open(RunDir(attached.run_dir)) as store:
        (finding,) = judged_losses(store, StallPolicy())
    return finding


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("by", ["error", "exit"])
def test_a_failure_is_dated_to_its_iteration(
    loop: Callable[[Parts], None], by: str, attached: tuple[Attached, Parts], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, parts = attached
    leave: Any = fail if by == "error" else lambda: sys.exit(3)
    monkeypatch.setattr(sys.modules[__name__], "fail", leave)
    with pytest.raises((RuntimeError, ValueError, SystemExit)) as raised:
        loop(parts)
    handle.end.record_failure(raised.value)
    finding = judged(handle)
    assert (finding.first_step, finding.cause) == (FAILS_AT, "exception" if by == "error" else "exit")
    assert finding.evidence["doing"] == PLACES.get(loop, "in user code after optimizer")


@pytest.mark.parametrize(("after", "place"), [(FAILS_AT - 1, "in data"), (FAILS_AT, "in user code after optimizer")])
def test_records_that_end_in_a_fetch_or_after_an_update_say_so(
    after: int, place: str, attached: tuple[Attached, Parts]
) -> None:
    handle, parts = attached
    is_fetch = place == "in data"
    found: list[Finding] = []

    def look() -> None:
        """Read the records as they are when a rank is killed here."""
        handle.recorder.event("exception", type="Killed", message="here", phase="")
        found.append(judged(handle))

    class Looks(Samples):
        def __getitem__(self, index: int) -> torch.Tensor:
            if is_fetch and index == after:
                look()
            return torch.ones(4)

    for index, batch in enumerate(DataLoader(Looks(), batch_size=1), start=1):
        parts.update(batch)
        if not is_fetch and index == after:
            look()
    assert [finding.first_step for finding in found] == [FAILS_AT]
    assert place in found[0].summary


def refusing(parts: Parts) -> None:
    for index in range(1, 16):
        parts.optimizer.zero_grad()
        parts.model(torch.full((4,), float("nan") if index == FAILS_AT else 1.0)).square().mean().backward()
        nn.utils.clip_grad_norm_(parts.model.parameters(), 1.0, error_if_nonfinite=True)
        parts.optimizer.step()


def test_the_loss_of_the_step_that_a_loop_refuses_is_kept(attached: tuple[Attached, Parts]) -> None:
    """As clipping with `error_if_nonfinite` refuses it: the step does not end, and its loss tells why."""
    handle, parts = attached
    with pytest.raises(RuntimeError, match="non-finite") as raised:
        refusing(parts)
    handle.end.record_failure(raised.value)
    assert handle.run_dir is not None
    with Store.open(RunDir(handle.run_dir)) as store:
        rows = store.rows("SELECT step, isfinite(loss), isfinite(local_loss), duration_ns IS NULL FROM steps")
    assert rows == [*((step, True, True, False) for step in range(1, FAILS_AT)), (FAILS_AT, False, False, True)]


def at_its_own_loss(parts: Parts) -> None:
    for index in range(1, 16):
        loss = parts.model(torch.full((4,), math.nan if index == FAILS_AT else 1.0)).square().mean()
        if not math.isfinite(loss.item()):
            sys.exit(1)
        parts.update(torch.ones(4))


def at_a_reduced_loss(parts: Parts) -> None:
    """The loss of another rank is NaN, and that of all."""
    for index in range(1, 16):
        loss = parts.model(torch.ones(4)).square().mean()
        loss_value = math.nan if index == FAILS_AT else loss.item()
        assert math.isfinite(loss_value), "Loss is nan"
        parts.update(torch.ones(4))


def at_another_error(parts: Parts) -> None:
    """The first minimum is Inf, there was no validation and no average, and the loss scale is too large."""
    lowest_loss, val_loss, avg_loss = math.inf, math.nan, math.nan
    for index in range(1, 16):
        loss = parts.model(torch.ones(4)).square().mean()
        scaled_loss = loss * math.inf
        assert scaled_loss.requires_grad
        if index == FAILS_AT and (loss.item() < lowest_loss or val_loss < lowest_loss or avg_loss < lowest_loss):
            sys.exit(1)
        parts.update(torch.ones(4))


@pytest.mark.parametrize(
    ("loop", "expected"),
    [(at_its_own_loss, (True, True)), (at_a_reduced_loss, (True, None)), (at_another_error, (None, None))],
)
def test_the_loss_at_which_a_loop_stops_before_its_backward_pass_is_kept(
    loop: Callable[[Parts], None], expected: tuple[bool | None, bool | None], attached: tuple[Attached, Parts]
) -> None:
    handle, parts = attached
    with pytest.raises((AssertionError, ValueError, SystemExit)) as raised:
        loop(parts)
    handle.end.record_failure(raised.value)
    assert handle.run_dir is not None
    with Store.open(RunDir(handle.run_dir)) as store:
        (row,) = store.rows(f"SELECT isnan(loss), isnan(local_loss) FROM steps WHERE step = {FAILS_AT}")
    assert row == expected
