"""Runs recorded on an H200, replayed with a delay in one rank (tests/support/replayed_gpu.py): the verdict on each.

Truth is the delay that was put in, and the same replay without it. `calls`: tapes without stamps of the compute stream,
where calls alone show times of the device. The recording under FSDP2 has steps of 40 to 130 ms without any fault.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.finding import Finding
from analyzers.report.wording.explained import next_step, why
from tests.depth import later
from tests.support.replayed_gpu import Delay, replayed_run
from watch.verdicts.diagnosed_run import diagnosed_run

DDP, FSDP2 = "stamped_none", "stamped_fsdp2_none"
OTHERWISE = later("the same fault in another layout, place or record: the cases beside it")


def fired(name: str, into: Path, *delays: Delay, calls: bool = False) -> tuple[Finding, ...]:
    with diagnosed_run(replayed_run(name, into, *delays, is_stamped=not calls), is_over=True) as (_, diagnosis):
        return diagnosis.fired


@pytest.mark.parametrize(
    ("name", "delay", "place"),
    [
        (DDP, Delay(rank=0, ms=20, where="backward", since=31), "in backward, on its device"),
        pytest.param(
            DDP, Delay(ms=15, where="optimizer", since=51), "in the optimizer, on its device", marks=OTHERWISE
        ),
        (FSDP2, Delay(ms=200, since=61), "in forward, on its device"),
        pytest.param(
            FSDP2, Delay(rank=0, ms=80, where="optimizer", since=45), "in the optimizer, on its device", marks=OTHERWISE
        ),
    ],
)
def test_a_slow_device_is_measured_to_two_milliseconds(name: str, delay: Delay, place: str, tmp_path: Path) -> None:
    (slow,) = fired(name, tmp_path, delay)
    assert (slow.kind, slow.ranks) == ("straggler", (delay.rank,))
    assert slow.first_step == pytest.approx(delay.since, abs=2)
    assert slow.evidence["excess_ms"] == pytest.approx(delay.ms, abs=2)
    assert place in slow.summary


@pytest.mark.parametrize(
    ("name", "delay", "place"),
    [
        (DDP, Delay(ms=30, where="data", on="host"), "before the forward pass, on its host"),
        pytest.param(
            DDP, Delay(rank=0, ms=80, where="after", on="host", since=31), "after the optimizer", marks=OTHERWISE
        ),
    ],
)
def test_a_host_that_sleeps_is_named_by_its_gap_though_all_phases_of_its_device_are_late(
    name: str, delay: Delay, place: str, tmp_path: Path
) -> None:
    """It has lost its lead, so its device waits for each launch."""
    (slow,) = fired(name, tmp_path, delay)
    assert (slow.ranks, slow.evidence["late_side"]) == ((delay.rank,), "host")
    assert slow.first_step == pytest.approx(delay.since, abs=2)
    assert place in slow.summary
    grown_ms = slow.evidence["step_ms"] - slow.evidence["step_without_it_ms"]
    assert grown_ms == pytest.approx(slow.evidence["excess_ms"], abs=2)


def test_a_late_host_costs_what_steps_grew_since_its_first_late_step(tmp_path: Path) -> None:
    """Its device is late from step 40 on: the steps in between, already longer, counted as steps before. The rank also
    prints in each tenth step."""
    (slow,) = fired(FSDP2, tmp_path, Delay(rank=0, ms=80, where="after", on="host", since=31))
    assert (slow.ranks, slow.evidence["late_side"], slow.evidence["place"]) == ((0,), "host", "after_optimizer")
    assert slow.first_step == pytest.approx(31, abs=2)
    assert slow.evidence["excess_ms"] == pytest.approx(57.4, rel=0.1), "longer than the same replay without the fault"


@pytest.mark.parametrize(
    ("name", "delay", "place"),
    [
        (DDP, Delay(rank=0, ms=20, where="backward", since=31), "in backward"),
        pytest.param(FSDP2, Delay(ms=200, since=61), "in forward", marks=OTHERWISE),
    ],
)
def test_calls_alone_show_a_slow_device_whose_peers_kernel_was_queued(
    name: str, delay: Delay, place: str, tmp_path: Path
) -> None:
    """The peer's kernel starts right after the call before and spins; the slow rank's starts late."""
    (slow,) = fired(name, tmp_path, delay, calls=True)
    assert (slow.kind, slow.ranks, slow.evidence["late_side"]) == ("straggler", (delay.rank,), "device")
    assert slow.first_step == pytest.approx(delay.since, abs=2)
    assert delay.ms / 2 <= slow.evidence["excess_ms"] <= delay.ms + 2
    assert place in slow.summary


@pytest.mark.parametrize("calls", [False, pytest.param(True, marks=OTHERWISE)])
def test_a_device_that_is_slow_in_every_second_step_is_named(calls: bool, tmp_path: Path) -> None:
    (slow,) = fired(DDP, tmp_path, Delay(every=2), calls=calls)
    assert (slow.kind, slow.ranks, slow.first_step) == ("straggler", (1,), 41)
    assert slow.evidence["excess_ms"] == pytest.approx(15, abs=2)
    assert "on its device" in slow.summary


@pytest.mark.parametrize("calls", [pytest.param(False, marks=OTHERWISE), True])
def test_a_link_that_is_slow_for_fifty_short_steps(calls: bool, tmp_path: Path) -> None:
    (slow,) = fired(DDP, tmp_path, Delay(on="transfer", factor=3.0), calls=calls)
    assert (slow.kind, slow.cause, slow.ranks) == ("straggler", "communication", (0, 1))
    assert slow.first_step == pytest.approx(41, abs=2)


def test_a_link_is_dated_though_the_network_was_slower_than_usual_before(tmp_path: Path) -> None:
    """From step 29 on transfers took twice as long as before, without a fault."""
    (slow,) = fired(FSDP2, tmp_path, Delay(on="transfer", factor=3.0))
    assert (slow.cause, slow.ranks) == ("communication", (0, 1))
    assert slow.first_step == pytest.approx(41, abs=2)


def test_a_host_whose_lateness_the_network_hides_in_a_third_of_the_steps(tmp_path: Path) -> None:
    """Its steps take 10 ms longer than without the fault. Those before took 46 to 98 ms, so their growth bounds
    nothing."""
    (slow,) = fired(FSDP2, tmp_path, Delay(where="data", on="host"))
    assert (slow.ranks, slow.evidence["late_side"]) == ((1,), "host")
    assert slow.first_step == 41
    assert slow.evidence["excess_ms"] == pytest.approx(10, abs=2)
    assert "before the forward pass, on its host" in slow.summary
    assert "step_without_it_ms" not in slow.evidence


def test_calls_alone_show_a_late_host_though_the_network_hides_it_for_eleven_steps(tmp_path: Path) -> None:
    """From step 46 on, when its lead is spent, to 67, and again from 78 on; spans of its host show the first step."""
    (slow,) = fired(FSDP2, tmp_path, Delay(where="data", on="host"), calls=True)
    assert (slow.ranks, slow.evidence["late_side"], slow.first_step) == ((1,), "host", 41)
    assert 0 < slow.evidence["excess_ms"] < 30
    assert "before the forward pass, on its host" in slow.summary


def test_a_host_that_is_late_in_every_second_step_is_named(tmp_path: Path) -> None:
    (slow,) = fired(DDP, tmp_path, Delay(ms=80, where="data", on="host", since=20, every=2))
    assert (slow.ranks, slow.evidence["late_side"], slow.evidence["pattern"]) == ((1,), "host", "pauses")
    assert slow.first_step == pytest.approx(20, abs=2)
    grown_ms = slow.evidence["step_ms"] - slow.evidence["step_without_it_ms"]
    assert slow.evidence["excess_ms"] == pytest.approx(grown_ms, abs=1)
    assert grown_ms == pytest.approx(53.6 - 38.3, abs=2), "in the mean, the same replay without the fault takes 38.3 ms"


@pytest.mark.parametrize(
    ("name", "delay", "side"),
    [
        (DDP, Delay(ms=20, where="clip"), "device"),
        (FSDP2, Delay(ms=80, where="clip", on="host", since=31), "host"),
    ],
)
def test_calls_alone_tell_a_late_device_from_a_late_host_by_the_lead_of_the_host(
    name: str, delay: Delay, side: str, tmp_path: Path
) -> None:
    """The launch queue is full in both, of the slow rank or of its peer: its host is blocked between the same phases as
    long as one that sleeps there."""
    (slow,) = fired(name, tmp_path, delay, calls=True)
    assert (slow.ranks, slow.evidence["late_side"]) == ((1,), side)
    assert "place" not in slow.evidence


def test_calls_alone_show_a_host_that_is_late_in_a_phase_by_its_spans(tmp_path: Path) -> None:
    """Its lead, and the work of the device meanwhile, hide a part of each delay."""
    (slow,) = fired(DDP, tmp_path, Delay(ms=80, on="host", since=36), calls=True)
    assert (slow.ranks, slow.evidence["late_side"], slow.evidence["place"]) == ((1,), "host", "forward")
    assert slow.first_step == 36
    assert slow.evidence["host_excess_ms"] == pytest.approx(80, abs=2)
    assert slow.evidence["excess_ms"] == pytest.approx(93.1 - 38.2, abs=2), "steps with and without the delay"
    assert "takes 80 ms longer there" in why(slow)


def test_a_gain_within_the_noise_of_the_steps_before_is_not_predicted(tmp_path: Path) -> None:
    """Steps took 64 ms before, and 49 ms since its device lost 5 ms in each: the network had been slow."""
    (slow,) = fired(FSDP2, tmp_path, Delay(ms=5))
    assert (slow.kind, slow.ranks) == ("straggler", (1,))
    assert slow.first_step == pytest.approx(41, abs=2)
    assert slow.evidence["excess_ms"] == pytest.approx(5, abs=2)
    assert "in forward, on its device" in slow.summary
    assert "step_without_it_ms" not in slow.evidence
    assert "is not predicted: earlier steps were as slow" in next_step(slow)


INNOCENT = {
    "healthy": Delay(ms=0),
    "both": Delay(rank=None, ms=25),
    "pause": Delay(ms=800, where="between", on="host", since=45, until=45),
    "saves": Delay(rank=None, ms=500, where="after", on="host", since=21, every=20),
}
SHOWN_BY_CALLS = ("both", "pause")
"""In which calls alone are judged as well in each run of the tests."""


@pytest.mark.parametrize(
    ("delay", "calls"),
    [
        pytest.param(
            delay, calls, marks=[OTHERWISE] if calls and name not in SHOWN_BY_CALLS else [], id=f"{name}-{calls}"
        )
        for name, delay in INNOCENT.items()
        for calls in (False, True)
    ],
)
def test_no_rank_is_accused(delay: Delay, calls: bool, tmp_path: Path) -> None:
    assert fired(DDP, tmp_path, delay, calls=calls) == ()


@pytest.mark.parametrize(
    ("name", "delay", "calls"),
    [
        (FSDP2, Delay(rank=None, ms=80, where="data", on="host"), False),
        pytest.param(FSDP2, Delay(rank=None, ms=80, where="between", on="host"), False, marks=OTHERWISE),
        pytest.param(DDP, Delay(rank=None, ms=150, where="data", on="host"), False, marks=OTHERWISE),
        (DDP, Delay(rank=None, ms=80, where="clip", on="host"), True),
    ],
)
def test_hosts_that_are_all_equally_late_accuse_no_rank(name: str, delay: Delay, calls: bool, tmp_path: Path) -> None:
    """One has lost its lead by a print, so the other's lead hides that its host is late, too, for dozens of steps."""
    assert fired(name, tmp_path, delay, calls=calls) == ()
