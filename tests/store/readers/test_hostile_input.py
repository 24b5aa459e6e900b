"""Dumps and traces that were made to harm (F48): one clear line or a partial report; nothing runs, nothing hangs."""

from __future__ import annotations

import io
import json
import math
import pickle
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from analyzers.evidence.diagnose_files import diagnose_files
from analyzers.report.json import to_json
from analyzers.report.terminal.diagnosis_text import render
from store.readers.dumps.flight_recorder import read_dump
from store.readers.dumps.safe_pickle import loads
from store.readers.programs import nvidia_smi_csv
from store.readers.untrusted.external_files import SourceError
from store.readers.untrusted.json_stream import members
from tests.store.readers.hostile_files import DUMPS, PROOF, TRACES, Writer
from tests.support.simulator.recorder_dumps import Job

CASES = [*DUMPS.items(), *TRACES.items()]


def report(folder: Path) -> str:
    """What `analyze` says, text and JSON together; an error's line where it refuses."""
    try:
        diagnosis = diagnose_files([folder])
    except SourceError as error:
        return str(error)
    screen = io.StringIO()
    console = Console(file=screen, width=200, no_color=True, legacy_windows=False)
    render(diagnosis, console)
    assert not any(ord(character) < 32 and character != "\n" for character in screen.getvalue())
    return screen.getvalue() + json.dumps(to_json(diagnosis), allow_nan=False)


@pytest.mark.parametrize(("writer", "words"), [case for _, case in CASES], ids=[name for name, _ in CASES])
def test_a_hostile_file(tmp_path: Path, writer: Writer, words: str) -> None:
    writer(tmp_path)
    before = time.process_time()
    said = report(tmp_path)
    assert words in said
    assert said.startswith("Verdict") or "\n" not in said
    assert not (tmp_path / PROOF).exists()
    assert time.process_time() - before < 60.0
    # /etc/hostname is what a link led to
    assert Path("/etc/hostname").read_text().strip() not in said or len(Path("/etc/hostname").read_text().strip()) < 4


def test_a_header_of_brackets_takes_linear_time() -> None:
    before = time.process_time()
    assert not nvidia_smi_csv.recognise(b"[" * 1_000_000)
    assert time.process_time() - before < 60.0


def test_a_unit_is_not_part_of_a_column_name(tmp_path: Path) -> None:
    path = tmp_path / "smi.csv"
    path.write_text("index, power.draw [W], ecc.errors.uncorrected.volatile.total\n3, 250.5 W, 2\n")
    assert nvidia_smi_csv.recognise(path.read_bytes())
    (row,) = nvidia_smi_csv.read(path).health
    assert (row["device"], row["power_watts"], row["ecc_uncorrected_total"]) == ("GPU 3", 250.5, 2)


def test_there_are_more_than_forty_cases() -> None:
    assert len(CASES) >= 70


@pytest.mark.parametrize("name", ["a class with __reduce__", "a FIFO", "an escape in a name", "sizes of NaN"])
def test_a_good_dump_next_to_a_hostile_one_is_read(tmp_path: Path, name: str) -> None:
    job = Job(3)
    job.steps(3)
    job.collective("all_reduce", ranks=[1])
    job.write(tmp_path, ranks=[1, 2])
    DUMPS[name][0](tmp_path)
    diagnosis = diagnose_files([tmp_path])
    assert 2 in diagnosis.fired[0].ranks
    assert not (tmp_path / PROOF).exists()


@pytest.mark.parametrize(
    "name",
    ["a million containers", "a huge place in the memo", "a string of 2 GB", "a bytearray of 2**62", "blanks in gzip"],
)
def test_memory_is_bounded(tmp_path: Path, name: str) -> None:
    DUMPS[name][0](tmp_path)
    program = (
        "import resource, sys\nfrom pathlib import Path\nfrom analyzers.evidence.diagnose_files import diagnose_files\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    diagnose_files([Path(sys.argv[1])])\nexcept ValueError:\n    pass\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    limit = 4 << 30  # of addresses, so that an allocation that is never touched fails, too

    def confine() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=100,
        preexec_fn=confine, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 700 << 10  # KiB


def test_a_large_sparse_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps(Job(1).dump(0), protocol=2))
    with path.open("r+b") as file:
        file.truncate(8 << 30)
    assert "more than the" in report(tmp_path)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    """Equal, with NaN equal to itself."""
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)


@given(value=PLAIN, protocol=st.integers(2, 5))
def test_plain_pickles_are_read_as_python_reads_them(value: Any, protocol: int) -> None:
    blob = pickle.dumps(value, protocol=protocol)
    assert same(loads(blob), value)


@given(blob=st.binary(max_size=300))
def test_any_bytes_are_a_value_or_an_error(blob: bytes) -> None:
    for data in (blob, b"\x80\x02" + blob):
        try:
            loads(data)
        except SourceError:
            pass


@given(data=st.data())
def test_a_good_pickle_with_bytes_changed_never_runs(data: st.DataObject) -> None:
    job = Job(2)
    job.steps(1)
    blob = bytearray(pickle.dumps(job.dump(0), protocol=2))
    for _ in range(data.draw(st.integers(1, 5))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    try:
        loads(bytes(blob))
    except SourceError:
        pass


FIELDS = ["frames", "record_id", "pg_id", "process_group", "collective_seq_id", "p2p_seq_id", "profiling_name",
          "time_created_ns", "input_sizes", "input_dtypes", "output_sizes", "state", "time_discovered_started_ns",
          "time_discovered_completed_ns", "retired", "timeout_ms", "is_p2p"]  # fmt: skip
ODD = PLAIN | st.sampled_from(
    ["nccl:send 0->1", "nccl:coalesced", "gloo:all_reduce", "completed", 2**62, [[8]], ("0", "x")]
)


@given(
    entries=st.lists(st.dictionaries(st.sampled_from(FIELDS), ODD), max_size=6),
    config=PLAIN | st.dictionaries(st.sampled_from(["", "0"]), PLAIN, max_size=2),
    status=PLAIN,
)
def test_any_fields_give_a_report(
    tmp_path_factory: pytest.TempPathFactory, entries: Any, config: Any, status: Any
) -> None:
    folder = tmp_path_factory.mktemp("any")
    job = Job(2)
    job.steps(1)
    good = job.dump(0)
    for rank in range(2):
        made = {"version": "2.10", "pg_config": config, "pg_status": status,
                "entries": [{**good["entries"][0], **entry} for entry in entries]}  # fmt: skip
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(made, protocol=2))
    diagnosis = diagnose_files([folder])
    json.dumps(to_json(diagnosis), allow_nan=False)
    render(diagnosis, Console(file=io.StringIO()))


@given(
    value=st.dictionaries(st.text(max_size=8), PLAIN, max_size=4),
    items=st.lists(PLAIN, max_size=6),
    size=st.integers(1, 40),
)
def test_json_is_read_the_same_in_any_chunks(value: dict[str, Any], items: list[Any], size: int) -> None:
    value.pop("items", None)
    blob = json.dumps({**value, "items": items}).encode()
    chunks = iter([blob[at : at + size] for at in range(0, len(blob), size)])
    found = list(members(chunks, {"items"}))
    assert same([item for key, item, is_item in found if is_item], items)
    assert same({key: item for key, item, is_item in found if not is_item}, value)


EVENT = st.dictionaries(st.sampled_from(["ph", "cat", "name", "ts", "dur", "pid"]),
                        PLAIN | st.sampled_from(["X", "kernel", "cpu_op", "user_annotation", "gpu_user_annotation",
                                                 "ProfilerStep#3", "gloo:x", "nccl", 5, 7.5]))  # fmt: skip


@given(found=st.lists(EVENT | PLAIN, max_size=12), about=PLAIN)
def test_any_events_give_a_report(tmp_path_factory: pytest.TempPathFactory, found: Any, about: Any) -> None:
    folder = tmp_path_factory.mktemp("any")
    for rank in range(2):
        made = {"schemaVersion": 1, "distributedInfo": about, "traceEvents": found}
        (folder / f"rank_{rank}.json").write_text(json.dumps(made))
    diagnosis = diagnose_files([folder])
    json.dumps(to_json(diagnosis), allow_nan=False)


def test_what_the_reader_takes_is_what_the_recorder_writes(tmp_path: Path) -> None:
    """The generator's dump survives the reader whole: no field that NCCL writes is refused."""
    job = Job(2)
    job.steps(3)
    job.p2p(0, 1)
    job.coalesced({0: ["send 0->1"], 1: ["recv 1<-0"]})
    job.write(tmp_path)
    dump = read_dump(tmp_path / "nccl_trace_rank_0", 0)
    assert (dump.num_entries, dump.damaged_entries, dump.version) == (6, 0, "2.10")
