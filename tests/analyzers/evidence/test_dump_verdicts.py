"""Verdicts on flight-recorder dumps: of real gloo ranks, and of NCCL's format beside what torch's own tool says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzers.evidence.diagnose_files import diagnose_files
from analyzers.finding import Finding
from analyzers.report.wording.explained import why
from tests.processes import run_ranks
from tests.store.readers.real_dumps import dump_of_a_hang
from tests.support.simulator.recorder_dumps import PREFIX, Job

TP = {"1": ("mesh_tp", [0, 1]), "2": ("mesh_tp", [2, 3]), "3": ("mesh_pp", [1, 3])}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of dumps that torch wrote, by what went wrong."""
    folders = {what: tmp_path_factory.mktemp(what) for what in ("skipped", "operation")}
    for what, folder in folders.items():
        run_ranks(dump_of_a_hang, world_size=2, args=(folder, what))
    return folders


@pytest.mark.parametrize("kind", ["pickle", "json"])
@pytest.mark.parametrize("when", ["hung", "failed"])
@pytest.mark.parametrize(
    ("what", "cause", "ranks"), [("skipped", "not_entered", (1,)), ("operation", "mismatch_operation", (0, 1))]
)
def test_real_gloo_dumps(
    real: dict[str, Path], what: str, when: str, kind: str, cause: str, ranks: tuple[int, ...]
) -> None:
    diagnosis = diagnose_files([real[what] / when / kind])
    (hang,) = diagnosis.findings
    assert (hang.kind, hang.status, hang.cause, hang.ranks) == ("hang", "fired", cause, ranks)
    assert (hang.evidence["process_group"], hang.evidence["seq"]) == ("group:0-1", 3)
    assert ("real_dumps.py" in hang.evidence["caller"]) == (kind == "pickle")  # JSON dumps have no stacks
    assert diagnosis.run["file_problems"] == []


def test_a_real_rank_without_a_dump_is_suspected(real: dict[str, Path], tmp_path: Path) -> None:
    """gloo's dumps list no members: that somebody is missing can only be suspected."""
    source = real["skipped"] / "hung" / "json" / "rank_0.json"
    shutil.copy2(source, tmp_path)
    (hang,) = diagnose_files([tmp_path]).findings
    assert (hang.status, hang.cause) == ("suspect", "all_entered")
    assert "A rank without a dump may not have entered the call" in hang.summary


def skipped(job: Job) -> None:
    job.collective("all_reduce", ranks=[0, 1, 2])


def operation(job: Job) -> None:
    job.collective("all_reduce", ranks=[0, 1, 3])
    job.collective("broadcast", ranks=[2])


def size(job: Job) -> None:
    job.collective("_all_gather_base", ranks=[0, 1, 3])
    job.collective("_all_gather_base", ranks=[2], numel=1000)


def dtype(job: Job) -> None:
    job.collective("all_reduce", ranks=[0, 1, 3])
    job.collective("all_reduce", ranks=[2], dtype="Half")


def order(job: Job) -> None:
    job.collective("all_reduce", group="1", ranks=[1])
    job.collective("all_reduce", ranks=[0, 2, 3])


def unanswered(job: Job) -> None:
    for _ in range(3):
        job.p2p(0, 1, group="3")
    job.p2p(0, 1, group="3", sides="recv", state="started")


def subgroup(job: Job) -> None:
    job.collective("all_reduce", group="2", ranks=[3])


def healthy(job: Job) -> None:
    job.steps(3)


# What happened, our (cause, ranks), and what torch's own tool makes of the same files.
BESIDE: list[tuple[Callable[[Job], None], tuple[str, tuple[int, ...]] | None, set[tuple[str, int]]]] = [
    (skipped, ("not_entered", (3,)), {("missing", 3)}),
    (operation, ("mismatch_operation", (2,)), {("COLLECTIVE_TYPE_MISMATCH", 2)}),
    (size, ("mismatch_size", (2,)), {("SIZE_OR_SYNTAX_MISMATCH", 2)}),
    (dtype, ("mismatch_dtype", (2,)), {("COLLECTIVE_DTYPE_MISMATCH", 2)}),
    (order, ("order_inversion", (0, 1)), {("missing", 0), ("missing", 1)}),  # torch names both and no cycle
    (unanswered, ("p2p_unmatched", (1,)), {("missing", 1)}),
    (subgroup, ("not_entered", (2,)), {("missing", 2)}),
    (healthy, None, set()),
]


@pytest.mark.parametrize(("fault", "ours", "torchs"), BESIDE, ids=lambda value: getattr(value, "__name__", ""))
def test_beside_torchs_own_tool(
    tmp_path: Path,
    fault: Callable[[Job], None],
    ours: tuple[str, tuple[int, ...]] | None,
    torchs: set[tuple[str, int]],
) -> None:
    job = Job(4, groups=TP)
    job.steps(5)
    fault(job)
    job.write(tmp_path)
    found = diagnose_files([tmp_path]).findings
    assert [(finding.cause, finding.ranks) for finding in found] == ([ours] if ours else [])
    assert all(finding.status == "fired" for finding in found)
    assert torchfrtrace(tmp_path) == torchs


def torchfrtrace(folder: Path) -> set[tuple[str, int]]:
    """What `torchfrtrace` finds: (kind, rank)."""
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.config_manager import JobConfig
    from torch.distributed.flight_recorder.components.loader import read_dir

    args: Any = JobConfig().parse_args([str(folder), "-p", PREFIX])
    details, version = read_dir(args)
    found: set[tuple[str, int]] = set()
    for collective in build_db(details, args, version).collectives:
        found |= {("missing", rank) for rank in collective.missing_ranks or ()}
        for rank, other in (collective.mismatch_collectives or {}).items():
            assert other.type_of_mismatch is not None
            found.add((other.type_of_mismatch.state.name, rank))
    return found


def hang_of(folder: Path) -> Finding:
    (hang,) = diagnose_files([folder]).fired
    return hang


@pytest.mark.parametrize("fault", [case[0] for case in BESIDE], ids=lambda fault: fault.__name__)
def test_json_says_the_same_as_the_pickle(tmp_path: Path, fault: Callable[[Job], None]) -> None:
    job = Job(4, groups=TP)
    job.steps(5)
    fault(job)
    both = [diagnose_files([job.write(tmp_path / kind, as_json=kind == "json")]) for kind in ("pickle", "json")]
    assert both[0].verdict == both[1].verdict


def test_the_caller_is_the_users_line(tmp_path: Path) -> None:
    job = Job(4)
    skipped(job)
    assert hang_of(job.write(tmp_path)).evidence["caller"] == "project/train.py:120 train_step"


def test_a_rank_without_a_dump_is_suspected_of_being_lost(tmp_path: Path) -> None:
    job = Job(4)
    job.steps(5)
    skipped(job)
    lost, unsure = diagnose_files([job.write(tmp_path, ranks=[0, 1, 2])]).findings
    assert (lost.kind, lost.status, lost.cause, lost.ranks) == ("rank_lost", "suspect", "no_dump", (3,))
    assert (unsure.kind, unsure.status) == ("hang", "insufficient_data")


def test_a_known_culprit_is_named_before_one_without_a_dump(tmp_path: Path) -> None:
    job = Job(4)
    job.steps(5)
    job.collective("all_reduce", ranks=[0, 3])
    hang, unsure = diagnose_files([job.write(tmp_path, ranks=[0, 1, 3])]).findings
    assert (hang.cause, hang.ranks) == ("not_entered", (1,))
    assert hang.evidence["ranks_without_dump"] == [2]
    assert "rank 2" in unsure.summary


def test_a_rank_that_nobody_waits_for_is_only_reported_missing(tmp_path: Path) -> None:
    job = Job(4)
    job.steps(5)
    diagnosis = diagnose_files([job.write(tmp_path, ranks=[0, 1, 2])])
    assert diagnosis.fired == ()
    assert "more data" in diagnosis.verdict


def test_dumps_of_a_run_that_goes_on_are_no_hang(tmp_path: Path) -> None:
    """Ranks are never at the same call: taken 0.2 s after the newest record, a call in flight is ordinary."""
    job = Job(4)
    job.steps(5)
    skipped(job)
    assert diagnose_files([job.write(tmp_path, after_s=0.2)]).findings == ()


def test_a_rank_dumped_before_the_call_is_not_accused_for_sure(tmp_path: Path) -> None:
    job = Job(4)
    job.steps(5)
    job.write(tmp_path, ranks=[3], after_s=0.0)
    job.now_ns += 30 * 10**9
    skipped(job)
    job.write(tmp_path, ranks=[0, 1, 2], after_s=60)
    hang = hang_of(tmp_path)
    assert (hang.status, hang.ranks) == ("suspect", (3,))
    assert "older than that call" in hang.summary


def test_a_mismatch_is_certain_without_any_silence(tmp_path: Path) -> None:
    job = Job(4)
    operation(job)
    assert hang_of(job.write(tmp_path, after_s=0.1)).status == "fired"


def test_a_call_that_the_watchdog_timed_out_is_certain(tmp_path: Path) -> None:
    job = Job(4)
    job.steps(5)
    job.collective("all_reduce", ranks=[0, 1, 2], timed_out=True)
    hang = hang_of(job.write(tmp_path, after_s=0.1))
    assert (hang.status, hang.ranks, hang.evidence["timed_out_ranks"]) == ("fired", (3,), [0, 1, 2])


def test_files_copied_much_later_do_not_lengthen_the_hang(tmp_path: Path) -> None:
    job = Job(4)
    skipped(job)
    hang = hang_of(job.write(tmp_path, after_s=30 * 86400))
    assert (hang.evidence["silent_s"], hang.evidence["limit_s"], hang.cost_s) == (None, None, None)
    assert (hang.status, hang.ranks) == ("suspect", (3,))
    assert "duration is unknown" in hang.summary
    assert " for 600 s" not in f"{hang.summary} {why(hang)}"


def test_records_lost_by_the_ring_are_reported(tmp_path: Path) -> None:
    job = Job(4, ring=10)
    job.steps(25)
    skipped(job)
    diagnosis = diagnose_files([job.write(tmp_path)])
    assert diagnosis.fired[0].ranks == (3,)
    assert diagnosis.run["dropped_records"] == {"of rank 0": 16, "of rank 1": 16, "of rank 2": 16, "of rank 3": 15}
    assert diagnosis.fired[0].evidence["ranks_that_lost_records"] == [0, 1, 2, 3]


def test_a_group_that_fell_out_of_the_ring_accuses_nobody(tmp_path: Path) -> None:
    """Rank 1 went through tp:0-1 long ago: that its ring holds nothing of it does not say that it never came."""
    job = Job(4, groups=TP, ring=10)
    job.collective("all_reduce", group="1", state="completed")
    job.steps(12)
    job.collective("all_reduce", group="1", ranks=[0])
    assert [f.cause for f in diagnose_files([job.write(tmp_path)]).findings] == ["all_entered"]


def test_p2p_is_matched_although_the_ring_lost_records(tmp_path: Path) -> None:
    job = Job(4, groups=TP, ring=12)
    for _ in range(20):
        job.p2p(0, 1, group="3")
    job.p2p(0, 1, group="3", sides="send", state="started")
    hang = hang_of(job.write(tmp_path))
    assert (hang.cause, hang.ranks) == ("p2p_unmatched", (3,))


def test_a_coalesced_batch_speaks_for_its_calls(tmp_path: Path) -> None:
    job = Job(2)
    job.coalesced({0: ["send 0->1", "recv 0<-1"], 1: ["recv 1<-0", "send 1->0"]}, state="completed")
    assert diagnose_files([job.write(tmp_path / "well")]).findings == ()
    job.coalesced({0: ["send 0->1", "recv 0<-1"]})
    hang = hang_of(job.write(tmp_path / "stuck"))
    assert (hang.cause, hang.ranks) == ("p2p_unmatched", (1,))


def test_two_groups_of_the_same_ranks_are_told_apart(tmp_path: Path) -> None:
    job = Job(2, groups={"7": ("undefined", [0, 1]), "8": ("undefined", [0, 1])})
    job.steps(3, group="7")
    job.collective("all_reduce", group="8", ranks=[0])
    hang = hang_of(job.write(tmp_path))
    assert (hang.ranks, hang.evidence["process_group"], hang.evidence["seq"]) == ((1,), "group:0-1#8", 1)


def test_a_rank_that_waits_in_a_call_with_unknown_members_is_not_accused(tmp_path: Path) -> None:
    """Rank 0's short ring lost all that it called in group 1: whom rank 1 waits for there is not known."""
    job = Job(3, groups={"1": ("undefined", [0, 1]), "2": ("undefined", [0, 1])}, ring=4)
    job.steps(5)
    job.collective("all_reduce", group="1", ranks=[1])
    job.collective("all_reduce", ranks=[2])
    assert hang_of(job.write(tmp_path)).ranks == (0,)


@given(data=st.data())
def test_the_rank_that_stops_is_named(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any program of collectives over any groups; one rank stops somewhere, the others go on until they must wait."""
    ranks = data.draw(st.integers(2, 7))
    subsets = st.lists(st.integers(0, ranks - 1), min_size=2, max_size=ranks, unique=True).map(sorted)
    groups = {str(i + 1): ("undefined", members) for i, members in enumerate(data.draw(st.lists(subsets, max_size=4)))}
    job = Job(ranks, groups=groups, ring=data.draw(st.sampled_from([4, 2000])))
    program = data.draw(st.lists(st.sampled_from(sorted(job.groups)), min_size=1, max_size=30))
    culprit, stops_at = data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(0, len(program)))
    waiting: set[int] = set()
    for place, group in enumerate(program):
        members = job.groups[group][1]
        gone = {culprit} if place >= stops_at else set()
        coming = [rank for rank in members if rank not in waiting | gone]
        whole = len(coming) == len(members)
        job.collective("all_reduce", group=group, ranks=coming, state="completed" if whole else "started")
        waiting |= set() if whole else set(coming)
    diagnosis = diagnose_files([job.write(tmp_path_factory.mktemp("job"))])
    if not waiting:
        assert diagnosis.fired == ()
    elif job.ring > 100:  # a short ring may have lost what the culprit called: then nobody is accused in its place
        assert [(finding.cause, finding.ranks) for finding in diagnosis.fired] == [("not_entered", (culprit,))]
        assert set(diagnosis.fired[0].evidence["waiting_ranks"]) == waiting
    else:
        named = [finding.ranks for finding in diagnosis.fired if finding.cause == "not_entered"]
        assert named in ([], [(culprit,)])


def test_a_skipped_call_is_named_by_the_order_of_the_calls_before(tmp_path: Path) -> None:
    job = Job(4)
    for _ in range(6):
        job.collective("all_reduce", state="completed")
        job.collective("all_gather", state="completed")
    job.collective("all_reduce", state="completed")
    job.collective("all_gather", ranks=[0, 1, 3])
    job.collective("all_reduce", ranks=[2])
    hang = hang_of(job.write(tmp_path))
    assert (hang.cause, hang.ranks, hang.status) == ("skipped", (2,), "fired")
    assert "Rank 2 skipped all_gather #14" in hang.summary


def test_a_call_that_others_completed_is_a_stuck_device(tmp_path: Path) -> None:
    job = Job(4)
    job.steps(5)
    job.collective("all_reduce", ranks=[0, 1, 2], state="completed")
    job.collective("all_reduce", ranks=[3])
    job.collective("all_gather", ranks=[0, 1, 2])
    (hang,) = diagnose_files([job.write(tmp_path)]).fired
    assert (hang.cause, hang.ranks, hang.status) == ("device_stuck", (3,), "fired")
    assert hang.evidence["completed_ranks"] == [0, 1, 2]
    assert "all_gather #7" in hang.summary


def test_ranks_outside_of_the_group_are_no_stuck_devices(tmp_path: Path) -> None:
    job = Job(4, groups={"1": ("tp", [0, 1]), "2": ("tp", [2, 3])})
    job.steps(5)
    job.collective("all_reduce", group="1", ranks=[0], state="completed")
    job.collective("all_reduce", group="1", ranks=[1])
    job.collective("all_reduce", group="2")
    (hang,) = diagnose_files([job.write(tmp_path)]).fired
    assert (hang.cause, hang.ranks) == ("device_stuck", (1,))


def test_a_call_that_a_device_has_not_started_is_a_stuck_device(tmp_path: Path) -> None:
    job = Job(4)
    job.steps(5)
    job.collective("all_reduce", ranks=[0, 1])
    job.collective("all_reduce", ranks=[2, 3], state="scheduled")
    for _ in range(3):  # the hosts run ahead
        job.collective("all_reduce", state="scheduled")
    (hang,) = diagnose_files([job.write(tmp_path)]).fired
    assert (hang.cause, hang.ranks, hang.evidence["waiting_ranks"]) == ("device_stuck", (2, 3), [0, 1])


def test_dumps_without_started_states_name_both_possibilities(tmp_path: Path) -> None:
    """Without TORCH_NCCL_ENABLE_TIMING no call is ever `started`."""
    job = Job(2)
    job.steps(5)
    for entries in job.entries:
        for entry in entries:
            entry["time_discovered_started_ns"] = None
    for _ in range(3):
        job.collective("all_reduce", state="scheduled")
    diagnosis = diagnose_files([job.write(tmp_path)])
    (hang,) = (finding for finding in diagnosis.findings if finding.kind == "hang")
    assert (hang.cause, hang.ranks, hang.status) == ("all_entered", (0, 1), "suspect")
    assert (
        "the network or the backend is stuck, or the device of one of them is stuck in an earlier kernel"
        in hang.summary
    )
    assert "TORCH_NCCL_ENABLE_TIMING" in hang.summary


def test_culprits_of_two_groups_are_named_with_their_own_calls(tmp_path: Path) -> None:
    job = Job(4, groups={"1": ("tp", [0, 1]), "2": ("tp", [2, 3])})
    job.steps(5)
    job.collective("all_gather", group="1", ranks=[0])
    job.collective("all_reduce", group="2", ranks=[2])
    (hang,) = diagnose_files([job.write(tmp_path)]).fired
    assert hang.ranks == (1, 3)
    assert sorted(map(tuple, hang.evidence["awaited"].values())) == [(1,), (3,)]


def test_dumps_of_active_calls_only_have_lost_no_records(tmp_path: Path) -> None:
    """What is absent there is complete: rank 1 is open in a call that rank 0 has left behind."""
    job = Job(2)
    job.steps(5)
    job.collective("all_reduce", ranks=[0], state="completed")
    job.collective("all_reduce", ranks=[1])
    job.collective("all_gather", ranks=[0])
    job.collective("all_gather", ranks=[0])
    for rank in (0, 1):
        job.entries[rank] = [entry for entry in job.entries[rank] if entry["state"] != "completed"]
    job.entries[0].pop(0)
    job.entries[0].append({**job.entries[0][-1], "record_id": job.entries[0][-1]["record_id"] + 5,
                           "collective_seq_id": job.entries[0][-1]["collective_seq_id"] + 5})  # fmt: skip
    diagnosis = diagnose_files([job.write(tmp_path)])
    assert [(one.cause, one.ranks) for one in diagnosis.fired] == [("device_stuck", (1,))]
    assert not diagnosis.run["dropped_records"].get("of rank 0")
