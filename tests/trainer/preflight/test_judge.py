"""The verdict over simulated clusters of up to 512 nodes, and over ones that are too small to compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.trainer.preflight.simulated import cluster, slower
from trainer.preflight.rounds import pair_rounds, repeat_rounds
from trainer.preflight.verdict.judge import judge
from trainer.preflight.verdict.peers import slow_among
from trainer.preflight.verdict.policy import PreflightPolicy
from trainer.preflight.verdict.readings import LinkReading, RankReading, Readings
from trainer.preflight.verdict.report import EXIT_FAILED, EXIT_INCOMPLETE, EXIT_PASSED, Line, PreflightReport


def bad(report: PreflightReport) -> list[Line]:
    return [line for line in report.lines if line.status != "pass"]


def on_rank(number: int, **changes: object) -> Callable[[RankReading], RankReading]:
    return lambda reading: replace(reading, **changes) if reading.rank == number else reading  # type: ignore[arg-type]


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 5, 8, 64])
@pytest.mark.parametrize("seed", range(5))
def test_healthy_cluster_passes(num_nodes: int, seed: int) -> None:
    report = judge(cluster(num_nodes, seed=seed))
    assert bad(report) == []
    assert report.exit_code(strict=True) == EXIT_PASSED
    checks = {line.check for line in report.lines}
    assert {"ranks", "versions", "settings", "disk", "matrix products", "memory", "links", "all-reduce"} <= checks


def test_faults_among_512_nodes_are_all_named_and_nothing_else() -> None:
    """A slow device, slow memory, a card that sends slowly, a slow link, a version, a setting, a clock."""
    healthy = cluster(512)
    lone = next(link for link in healthy.links if 9 not in {link.source // 8, link.target // 8})

    def rank(reading: RankReading) -> RankReading:
        number = reading.rank
        if number == 903:
            return replace(reading, matmul_flops_per_s=0.7 * (reading.matmul_flops_per_s or 0))
        if number == 2222:
            return replace(reading, memory_bytes_per_s=0.85 * (reading.memory_bytes_per_s or 0))
        if number // 8 == 40:
            reading = replace(reading, facts={**reading.facts, "torch": "2.12.0"})
            return replace(reading, clock_offset_ns=-3_000_000_000 if not reading.local_rank else None)
        if number // 8 in (100, 101):
            return replace(reading, settings={"OMP_NUM_THREADS": "8"})
        return replace(reading, shared_free_bytes=64 << 20) if number // 8 == 300 else reading

    def link(reading: LinkReading) -> LinkReading:
        if reading.source == 9 * 8 + 3:
            return slower(reading, 0.2)
        return slower(reading, 0.6) if (reading.source, reading.target) == (lone.source, lone.target) else reading

    found = bad(judge(cluster(512, rank=rank, link=link)))
    ends = (lone.source, lone.target)
    assert [(line.check, line.status, line.ranks) for line in found if line.check not in {"settings", "versions"}] == [
        ("clocks", "fail", ()), ("shared memory", "warn", ()), ("matrix products", "fail", (903,)),
        ("memory", "warn", (2222,)), ("links", "fail", (75,)), ("links", "warn", ends),
    ]  # fmt: skip
    versions = next(line for line in found if line.check == "versions")
    assert versions.text == "torch is 2.12.0 on gpu-040, and 2.13.0 on 511 other nodes."
    setting = next(line for line in found if line.check == "settings")
    assert setting.text == "NCCL_IB_HCA is not set on gpu-100, gpu-101, and mlx5 on 510 other nodes."
    clock = next(line for line in found if line.check == "clocks")
    assert clock.text == "The clock of gpu-040 is 3 s behind the others."
    sends = next(line for line in found if line.ranks == (75,))
    assert sends.text.startswith("Rank 75 on gpu-009 sends at most ")
    assert "with 9 partners, 2" in sends.text


def test_wrong_clock_of_rank_0_is_named_and_not_the_others() -> None:
    def rank(reading: RankReading) -> RankReading:
        return replace(reading, clock_offset_ns=-3_000_000_000) if reading.rank and not reading.local_rank else reading

    assert [line.text for line in bad(judge(cluster(8, rank=rank)))] == [
        "The clock of gpu-000 is 3 s ahead of the others."
    ]


def test_missing_rank_is_incomplete() -> None:
    readings = cluster(4)
    report = judge(replace(readings, ranks=readings.ranks[:-2], links=(), all_reduce=None))
    assert bad(report)[0].text == "Ranks 30 and 31 of 32 did not answer."
    assert report.exit_code() == EXIT_INCOMPLETE


def test_rank_that_could_not_communicate_is_incomplete() -> None:
    report = judge(cluster(4, rank=on_rank(9, problem="RuntimeError: Connection refused")))
    assert bad(report)[0].text == "Rank 9 on gpu-001 could not measure: RuntimeError: Connection refused."
    assert report.exit_code() == EXIT_INCOMPLETE


def test_what_was_not_measured_never_passes() -> None:
    def rank(reading: RankReading) -> RankReading:
        return replace(
            reading, matmul_flops_per_s=None, memory_bytes_per_s=None, disk_free_bytes=None, clock_offset_ns=None
        )

    report = judge(replace(cluster(4, rank=rank), all_reduce=None))
    assert {line.check for line in bad(report)} == {"clocks", "disk", "matrix products", "memory", "all-reduce"}


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 8])
def test_slow_node_among_few(num_nodes: int) -> None:
    """Of two nodes only the direction can be named."""
    report = judge(cluster(num_nodes, 1, link=lambda one: slower(one, 0.2) if one.source == 1 else one))
    (line,) = bad(report)
    assert line.status == "fail"
    assert line.nodes == (("gpu-001", "gpu-000") if num_nodes == 2 else ("gpu-001",))
    assert report.exit_code() == EXIT_FAILED


@pytest.mark.parametrize(("speed", "is_named"), [(33.1, True), (60.0, False)])
def test_a_third_of_the_speed_stands_out_of_any_spread(speed: float, is_named: bool) -> None:
    """As measured on two cores of a shared host, whose clock went up by a quarter half way."""
    speeds = [78.0, 80.0, 76.0, 79.0, speed, 101.0, 100.0, 101.0]
    values = dict(enumerate(speeds))
    assert (4 in slow_among(values, slow_ratio=0.9, policy=PreflightPolicy())) == is_named


def test_late_node_and_late_link() -> None:
    def late(reading: LinkReading) -> LinkReading:
        ends = {reading.source, reading.target}
        return replace(reading, latency_s=5e-4) if 3 in ends or ends == {5, 6} else reading

    found = bad(judge(cluster(8, 1, link=late)))
    assert [(line.check, line.ranks) for line in found] == [("latency", (3,)), ("latency", (5, 6))]


def test_busy_core_is_named_unless_all_ranks_wait() -> None:
    assert [line.check for line in bad(judge(cluster(4, rank=on_rank(5, core_wait_ratio=0.5))))] == ["cores"]
    assert bad(judge(cluster(4, rank=lambda reading: replace(reading, core_wait_ratio=0.5)))) == []


def test_devices_of_other_models_are_no_peers() -> None:
    def rank(reading: RankReading) -> RankReading:
        return replace(reading, device="A100", matmul_flops_per_s=2.5e14) if reading.rank < 8 else reading

    assert bad(judge(cluster(4, rank=rank))) == []


def test_slower_than_its_own_past() -> None:
    """The whole job is 20 % slower than before: no peer shows it."""

    def rank(reading: RankReading) -> RankReading:
        return replace(reading, matmul_flops_per_s=0.8 * (reading.matmul_flops_per_s or 0))

    now = cluster(1, 4, rank=rank)
    past = [cluster(1, 4, seed=seed) for seed in range(1, 6)]
    found = bad(judge(now, past=past))
    assert [line.ranks for line in found] == [(0,), (1,), (2,), (3,)]
    assert "% of its speed in matrix products of 5 earlier preflights." in found[0].text
    assert bad(judge(now, past=past[:2])) == []
    assert bad(judge(cluster(1, 4), past=past)) == []


def test_suspicious_host_of_the_fleet() -> None:
    report = judge(cluster(4), suspicious={"gpu-002": "4 of 9 runs (dead rank)", "other": "9 of 9 runs"})
    (line,) = bad(report)
    assert line.text == "Host gpu-002 had more trouble in earlier runs than chance explains: 4 of 9 runs (dead rank)."
    assert report.exit_code() == EXIT_PASSED
    assert report.exit_code(strict=True) == EXIT_FAILED


@pytest.mark.parametrize("num_ends", [2, 3, 7, 8, 9, 33, 512])
def test_rounds_are_disjoint_and_never_repeat_a_pair(num_ends: int) -> None:
    rounds = pair_rounds(num_ends)
    seen = [pair for pairs in rounds for pair in pairs]
    assert len(seen) == len(set(seen))
    for pairs in rounds:
        ends = [end for pair in pairs for end in pair]
        assert len(ends) == len(set(ends)) == num_ends // 2 * 2
    assert len(rounds) <= max(7, 9)
    if num_ends <= 8:
        assert len(seen) == num_ends * (num_ends - 1) // 2


def test_repeats_are_disjoint_and_bounded() -> None:
    assert repeat_rounds({(0, 3), (0, 5), (1, 2)}) == [[(0, 3), (1, 2)], [(0, 5)]]
    assert len(repeat_rounds({(0, end) for end in range(1, 9)}, most_rounds=3)) == 3


def test_readings_survive_json() -> None:
    readings = cluster(2)
    assert Readings.of_json(readings.to_json()) == readings
