"""The simulator behind `benchmarks/accuracy/diagnosis.py`: that it simulates what it says, and writes what real ranks
write."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analyzers.account.step_account import step_accounts
from benchmarks.accuracy.diagnosis import judge
from benchmarks.accuracy.diagnosis_summary import offered, wilson
from benchmarks.accuracy.labelled import EXPECTED, Case, make
from probes.step_clock import not_measured_on_devices
from probes.tape.format.reader import read_header, read_segment
from probes.tape.format.schema import TABLES
from probes.tape.format.writer import COMPLETE, HEADER_PREFIX, JSON_OFFSET, TapeWriter, segment_name
from probes.tape.rundir import RunDir
from store import Store
from tests.support.simulator import (
    QUIET,
    Clock,
    Fault,
    Job,
    Layout,
    Noise,
    Recording,
    Scenario,
    fit_noise,
    simulate,
    write,
)
from tests.support.simulator.faults import CONTROL
from tests.support.simulator.on_devices import nccl_queue_times
from tests.support.simulator.scale import Size, write_big
from tests.support.simulator.tapes import record_dtype, write_segments

STILL = Noise(
    compute_ratio=0.0, rank_ratio=0.0, step_ratio=0.0, preemptions_per_s=0.0, gc_interval_steps=1e9, data_ratio=0.0,
    data_miss_probability=0.0, transfer_ratio=0.0, transfer_tail_probability=0.0, exit_s=0.0, call_s=0.0, compile_s=0.0,
    communicator_s=0.0,
)  # fmt: skip
LAYOUTS = (
    Layout(dp_replicate=8),
    Layout(dp_shard=8),
    Layout(dp_shard=4, tp=2),
    Layout(dp_replicate=2, dp_shard=4),
    Layout(pp=4, dp_shard=2, microbatches=8, layers=1),
)


def recorded(layout: Layout, steps: int = 12, fault: Fault | None = None, **values: Any) -> Recording:
    return simulate(Scenario(seed=5, layout=layout, steps=steps, fault=fault, **values))


def columns(recording: Recording, table: str = "collectives") -> dict[str, Any]:
    found = recording.log.columns(table, recording.until)
    texts = np.array(["", *recording.log.names.texts], dtype=object)
    kinds = {column.name: column.type for column in TABLES[table].columns}
    return {name: texts[values] if kinds.get(name) == "name" else values for name, values in found.items()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_written_run_is_read_back_whole(layout: Layout, tmp_path: Path) -> None:
    recording = recorded(layout)
    run = write(recording, tmp_path / "run")
    with Store.open(run) as store:
        assert store.rows("SELECT count(*) FROM ingest_problems") == [(0,)]
        assert store.rows("SELECT count(*), count(duration_ns) FROM steps") == [(12 * layout.num_ranks,) * 2]
        assert store.rows("SELECT count(*) FROM collectives WHERE end_ns IS NULL") == [(0,)]
        parts = "data_ns + forward_ns + backward_ns + optimizer_ns"
        assert store.rows(f"SELECT count(*) FROM steps WHERE {parts} > duration_ns") == [(0,)]
        # The wait of a span is not longer than the span.
        assert store.rows("SELECT count(*) FROM spans WHERE wait_ns > end_ns - start_ns OR wait_ns < 0") == [(0,)]


@pytest.mark.parametrize("layout", LAYOUTS[2:], ids=lambda layout: layout.name)
def test_a_run_on_devices_has_the_columns_of_probes_there(layout: Layout, tmp_path: Path) -> None:
    """Phases, waits, shapes and callers cannot be recorded on one of several GPUs without stamps."""
    recording = recorded(layout, on_devices=True)
    calls = columns(recording)
    run = write(recording, tmp_path / "run")
    with Store.open(run) as store:
        assert store.rows("SELECT count(*) FROM ingest_problems") == [(0,)]
        unset = ", ".join(f"count({name})" for name in not_measured_on_devices())
        assert set(store.rows(f"SELECT {unset} FROM steps")[0]) == {0}
        assert store.rows("SELECT count(data_ns) FROM steps") == [(12 * layout.num_ranks,)]
        assert store.rows("SELECT count(wait_ns) FROM spans") == [(0,)]
        assert store.rows("SELECT count(wait_ns), count(shape), count(caller), count(nonfinite) FROM collectives") == [
            (0, 0, 0, 0)
        ]
        found = store.rows("SELECT process_group, op, count(*), sum(bytes) FROM collectives GROUP BY ALL ORDER BY ALL")
        queued = store.rows("SELECT count(*) FROM nccl_calls WHERE kernel_start_ns < enqueue_ns")
    assert queued == [(0,)]
    expected: dict[tuple[str, str], list[int]] = {}
    for group, op, size in zip(calls["process_group"], calls["op"], calls["bytes"], strict=True):
        count = expected.setdefault((group, op), [0, 0])
        count[0], count[1] = count[0] + 1, count[1] + int(size)
    assert {(group, op): [count, int(size)] for group, op, count, size in found} == expected


def test_stamped_devices_have_their_phases_and_what_they_waited_for(tmp_path: Path) -> None:
    recording = recorded(LAYOUTS[2], on_devices=True, stamped=True)
    run = write(recording, tmp_path / "run")
    with Store.open(run) as store:
        assert store.rows("SELECT count(*) FROM ingest_problems") == [(0,)]
        assert store.rows("SELECT count(forward_ns) > 0, min(stamped_steps), max(forward_late_ns) FROM steps") == [
            (True, 1, 0)
        ]
        assert max(account.not_measured_ns for account in step_accounts(store)) < 1000  # times are rounded
        assert all(account.host_late_ns > 0 for account in step_accounts(store))
        assert store.rows("SELECT count(wait_ns) FROM spans") == [(0,)]


def test_a_scenario_is_the_same_again_and_a_shorter_one_its_beginning() -> None:
    layout = Layout(dp_shard=4, tp=2)
    first, again, shorter = recorded(layout), recorded(layout), recorded(layout, steps=7)
    for table in ("steps", "collectives", "spans"):
        a, b, c = (columns(recording, table) for recording in (first, again, shorter))
        kept = a["step"] <= 7
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], name)  # what is not recorded is NaN on both sides
            np.testing.assert_array_equal(a[name][kept], c[name], name)


def test_segments_are_those_of_a_tape_writer(tmp_path: Path) -> None:
    table = TABLES["steps"]
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    writer = TapeWriter(theirs, table, rank=3, attempt=0, clock_ns=lambda: 77)
    row = writer.unset_row()
    records = np.zeros(2, dtype=record_dtype(table))
    for number in range(2):
        row[0], row[1] = number + 1, 1000 + number
        writer.append(COMPLETE, *row)
        for column, value in zip(table.columns, row, strict=True):
            records[column.name][number] = value
    records["state"] = COMPLETE
    writer.close()
    write_segments(ours, table, records, rank=3, mono_ns=77, wall_minus_mono_ns=5)
    name = segment_name("steps", 0)
    a, b = read_segment(ours / name), read_segment(theirs / name)
    for column in a.records.dtype.names:  # as bytes: also the payload of "not recorded"; padding may be anything
        assert a.records[column].tobytes() == b.records[column].tobytes(), column
    assert a.header.dtype == b.header.dtype
    assert read_header(ours / name).wall_minus_mono_ns == 5
    keys = [sorted(json.loads(_json(folder / name))) for folder in (ours, theirs)]
    assert keys[0] == keys[1]


def _json(path: Path) -> bytes:
    blob = path.read_bytes()
    length = HEADER_PREFIX.unpack_from(blob)[2]
    assert struct.calcsize(HEADER_PREFIX.format) == JSON_OFFSET
    return blob[JSON_OFFSET : JSON_OFFSET + length]


def test_members_leave_a_collective_together_and_the_last_to_arrive_waits_least() -> None:
    found = columns(recorded(Layout(dp_replicate=8), fault=Fault(kind="slow_compute", rank=5, step=4, factor=1.5)))
    calls = (found["op"] == "all_reduce") & (found["step"] > 6) & (found["seq"] > 0)
    for seq in np.unique(found["seq"][calls & (found["shape"] == "2")]):
        own = calls & (found["seq"] == seq) & (found["shape"] == "2")
        assert np.ptp(found["end_ns"][own]) < 1e6
    late = calls & (found["seq"] == 4 * 8 - 1) & (found["process_group"] == "dp_replicate:0-7")
    assert found["rank"][late][np.argmin((found["end_ns"] - found["issue_ns"])[late])] == 5


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 8), (8, 8)])
def test_the_bubble_of_a_still_pipeline_is_that_of_the_formula(schedule: str, stages: int, count: int) -> None:
    layout = Layout(pp=stages, microbatches=count, layers=1, schedule=schedule, ranks_per_node=64)
    job = Job(activation_bytes=8 << 10, block_bytes=1 << 10, optimizer_s=0.0, data_s=0.0, latency_s=0.0)
    spans = columns(recorded(layout, steps=2, noise=STILL, job=replace(job, checkpoint_interval=0)), "spans")
    own = (spans["step"] == 2) & (spans["rank"] == 0) & np.isin(spans["kind"], ["forward", "backward"])
    everybody = (spans["step"] == 2) & np.isin(spans["kind"], ["forward", "backward"])
    length = spans["end_ns"][everybody].max() - spans["start_ns"][everybody].min()
    busy = (spans["end_ns"] - spans["start_ns"])[own].sum()
    assert 1 - busy / length == pytest.approx((stages - 1) / (count + stages - 1), abs=0.002)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_hanging_rank_never_enters_and_the_others_stay_inside(layout: Layout) -> None:
    recording = recorded(layout, fault=Fault(kind="hang", rank=2, step=8))
    found = columns(recording)
    in_flight = set(found["rank"][found["state"] != COMPLETE].tolist())
    assert not recording.closed
    assert 2 not in in_flight
    assert in_flight | {2} == set(range(layout.num_ranks))
    assert found["step"].max() == 8


def test_a_killed_rank_writes_nothing_after_its_death() -> None:
    recording = recorded(Layout(dp_replicate=8), fault=Fault(kind="kill", rank=2, step=8))
    dead_at = recording.until[2]
    for table, begin in (("steps", "start_ns"), ("spans", "start_ns"), ("collectives", "issue_ns")):
        found = columns(recording, table)
        own = found["rank"] == 2
        assert found[begin][own].max() <= dead_at
        assert found[begin][~own].max() <= recording.until.max()
    exits = [event for event in recording.events if event.kind == "rank_exit"]
    assert [(event.detail["exit_rank"], event.detail["signal"]) for event in exits] == [(2, "SIGKILL")]


@pytest.mark.parametrize("kind", [kind for kind in CONTROL if kind != "missing_recv"])
def test_programs_that_differ_come_to_a_standstill(kind: str) -> None:
    recording = recorded(Layout(dp_replicate=8), fault=Fault(kind=kind, rank=2, step=8, what="gradient"))
    found = columns(recording)
    assert not recording.closed
    assert (found["state"] != COMPLETE).any()


def test_a_send_without_receive_leaves_the_sender_alone() -> None:
    layout = Layout(pp=4, dp_shard=2, microbatches=8, layers=1)
    found = columns(recorded(layout, fault=Fault(kind="missing_recv", rank=3, step=8)))
    open_p2p = (found["state"] != COMPLETE) & np.isin(found["op"], ["send", "recv"])
    assert found["op"][open_p2p].tolist() == ["send"]
    assert (found["rank"][open_p2p].tolist(), found["peer"][open_p2p].tolist()) == ([5], [3])


def test_a_dead_network_keeps_everybody_inside() -> None:
    found = columns(recorded(Layout(dp_shard=4, tp=2), fault=Fault(kind="dead_link", rank=2, step=8)))
    # Its first call in the step gathers parameters: the whole group has come, and nobody leaves.
    stuck = (found["state"] != COMPLETE) & (found["process_group"] == "dp_shard:0-6/2")
    first = stuck & (found["seq"] == found["seq"][stuck].min())
    assert found["rank"][first].tolist() == [0, 2, 4, 6]


def test_a_nan_is_flagged_on_its_rank_before_the_reduction_and_on_all_after_it() -> None:
    fault = Fault(kind="nan_grad", rank=2, step=8, block=1)
    recording = recorded(Layout(dp_replicate=8), fault=fault, recovers=False)
    found, steps = columns(recording), columns(recording, "steps")
    flagged = found["nonfinite"] == 1
    gradients = flagged & (found["process_group"] == "dp_replicate:0-7") & (found["step"] == 8)
    assert found["rank"][gradients].tolist() == [2]
    assert sorted(found["rank"][flagged & (found["step"] == 8) & (found["dtype"] == "float64")]) == list(range(8))
    assert np.isnan(steps["grad_norm"][steps["step"] == 8]).all()
    assert np.isfinite(steps["loss"][steps["step"] == 8]).all()
    assert np.isnan(steps["loss"][steps["step"] == 9]).all()  # the update was taken


def test_an_overflow_is_flagged_by_no_input_of_the_reduction() -> None:
    found = columns(recorded(Layout(dp_shard=8), fault=Fault(kind="overflow", rank=2, step=8), recovers=False))
    now = found["step"] == 8
    assert not (found["nonfinite"][now & (found["op"] == "reduce_scatter")] == 1).any()
    assert (found["nonfinite"][now & (found["dtype"] == "float64")] == 1).sum() == 1  # the shard that holds the element


def test_an_inf_in_a_pipeline_travels_down_and_its_gradients_back() -> None:
    layout = Layout(pp=4, dp_shard=2, microbatches=8, layers=1)
    fault = Fault(kind="inf_activation", rank=2, step=8, microbatch=3)
    found = columns(recorded(layout, fault=fault, recovers=False))
    bad = (found["nonfinite"] == 1) & (found["step"] == 8) & (found["op"] == "reduce_scatter")
    assert sorted(found["rank"][bad].tolist()) == [0, 2, 4, 6]  # its replica of every stage


def test_a_refused_step_is_run_again_without_its_batch() -> None:
    recording = recorded(Layout(dp_replicate=8), steps=20, fault=Fault(kind="nan_grad", rank=2, step=15))
    steps = columns(recording, "steps")
    own = steps["rank"] == 0
    assert steps["step"][own].tolist() == [*range(1, 16), *range(11, 21)]
    assert steps["batch_index"][own].tolist() == [*range(15), *range(15, 25)]
    assert steps["committed"][own].tolist() == [1] * 14 + [0] + [1] * 10


def test_a_flipped_bit_differs_on_one_replica_from_its_step_on() -> None:
    recording = recorded(Layout(dp_replicate=8), steps=30, fault=Fault(kind="bit_flip", rank=2, step=15))
    found = columns(recording, "fingerprints")
    for step in (10, 20, 30):
        for tensor in np.unique(found["tensor"]):
            own = (found["step"] == step) & (found["tensor"] == tensor)
            odd = found["rank"][own][found["hash"][own] != np.median(found["hash"][own])].tolist()
            assert odd == ([2] if step >= 15 and tensor == "blocks.0.mlp.up.weight" else [])


def test_clock_offsets_change_no_duration(tmp_path: Path) -> None:
    layout = Layout(dp_replicate=16, ranks_per_node=8)
    clock = Clock(skew_s=(0.0, 600.0), step_back_s=30.0, step_back_after_s=1.0)
    sound, skewed = recorded(layout, steps=6), recorded(layout, steps=6, clock=clock)
    runs = [write(recording, tmp_path / name) for recording, name in ((sound, "sound"), (skewed, "skewed"))]
    sql = "SELECT rank, step, duration_ns, start_ns FROM steps ORDER BY rank, step"
    with Store.open(runs[0]) as first, Store.open(runs[1]) as second:
        a, b = first.query(sql), second.query(sql)
        problems = second.rows("SELECT problem FROM ingest_problems")
    assert np.array_equal(a["duration_ns"], b["duration_ns"])
    assert "clock was 600.0 s ahead" in str(problems)
    assert np.abs(b["start_ns"] - a["start_ns"])[a["rank"] == 8].max() < 1e9, "shown by the first node's clock"


def test_fitted_noise_is_the_noise_that_was_put_in(tmp_path: Path) -> None:
    noise = replace(QUIET, compute_ratio=0.03, rank_ratio=0.02, preemptions_per_s=0.0)
    run = write(recorded(Layout(dp_replicate=16, layers=1), steps=60, noise=noise), tmp_path / "run")
    with Store.open(run) as store:
        fitted = fit_noise(store, QUIET)
    # A step's own time is a forward and twice as much backward, each with separate noise.
    assert fitted.compute_ratio == pytest.approx(0.03 * np.sqrt(1 + 4) / 3, rel=0.2)
    assert fitted.rank_ratio == pytest.approx(0.02, rel=0.5)
    assert fitted.local_loss_ratio == pytest.approx(noise.local_loss_ratio, rel=0.25)


def test_a_large_run_has_the_stated_size(tmp_path: Path) -> None:
    size = Size(ranks=40, steps=1300, in_flight=30, slow_rank=17, ranks_per_node=40)
    done = write_big(size, tmp_path / "run")
    with Store.open(RunDir.open(tmp_path / "run")) as store:
        assert store.rows("SELECT count(*), count(DISTINCT rank) FROM steps") == [(40 * 1300, 40)]
        assert store.rows("SELECT count(*), count(DISTINCT rank) FROM collectives WHERE end_ns IS NULL") == [
            (39 * 30, 39)
        ]
        slowest = store.rows(
            "SELECT rank FROM steps WHERE step > 700 GROUP BY rank ORDER BY avg(backward_wait_ns) LIMIT 1"
        )
    assert slowest == [(17,)]
    assert done["rows"] == 40 * 1330


@pytest.mark.parametrize("fault", EXPECTED)
def test_every_fault_of_the_benchmark_can_be_made(fault: str) -> None:
    for index in range(3):
        scenario, truth = make(Case(fault=fault, seed=1, index=index, ranks=16))
        assert scenario.layout.num_ranks == 16
        assert bool(truth) != EXPECTED[fault].is_clean


def test_a_case_is_judged_from_its_files() -> None:
    killed = judge(Case(fault="kill", seed=0, index=0, ranks=8))
    assert (killed.error, killed.kind, killed.rank, killed.cause) == ("", True, True, True)
    flipped = judge(Case(fault="bit_flip_shard", seed=0, index=0, ranks=8))
    assert (flipped.error, flipped.rank, flipped.wrong) == ("", True, 0)
    clean = judge(Case(fault="clean", seed=0, index=0, ranks=8))
    assert (clean.error, clean.seen, clean.wrong) == ("", False, 0)


def test_wilson_interval() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(500, 500)
    assert (low, high) == pytest.approx((0.9924, 1.0), abs=1e-4)


def test_every_fault_has_an_analysis_that_can_report_it() -> None:
    assert [name for name, expected in EXPECTED.items() if not offered(expected)] == []


def test_behind_a_call_that_never_ends_no_call_of_its_communicator_ends() -> None:
    """A device works through a queue, so the next bucket of a hung reduction is not reduced; other groups go on."""
    rank, op, peer = np.zeros(5, np.int64), np.ones(5, np.int64), np.full(5, -1)
    communicator = np.array([0, 0, 1, 0, 1])
    issue, end = np.array([0, 10, 11, 12, 40]) * 1_000_000, np.array([5, -1, 20, 30, 50]) * 1_000_000
    end[1] = -1
    start, ended = nccl_queue_times(rank, communicator, op, peer, issue, end, np.array([1e12]))
    assert (ended >= 0).tolist() == [True, False, True, False, True]
    assert (start >= 0).tolist() == [True, True, True, False, True]
