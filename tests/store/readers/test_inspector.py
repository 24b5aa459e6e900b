"""NCCL's inspector, in the shape that `ext-profiler/inspector/json.cc` writes: one object a line, without spaces."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from analyzers.evidence.diagnose_files import diagnose_files
from analyzers.stragglers.explain import WHY
from store.readers.formats import format_of
from store.readers.inspector import read_inspector
from tests.sentences import assert_plain

RANKS, CALLS = 4, 80


def line(rank: int, seq: int, exec_us: int, *, group: str = "0x7f8c", pid: int | None = None, size: int = RANKS) -> str:
    about = {
        "header": {"id": group, "rank": rank, "n_ranks": size, "nnodes": 1},
        "metadata": {
            "inspector_output_format_version": "v4.0", "git_rev": "", "rec_mechanism": "nccl_profiler_interface",
            "dump_timestamp_us": 1748030377748202 + seq, "hostname": "gpu-01", "pid": 70 + rank if pid is None else pid,
        },
        "coll_perf": {
            "coll": "AllReduce", "coll_sn": seq, "coll_msg_size_bytes": 1 << 20, "coll_exec_time_us": exec_us,
            "coll_timing_source": "kernel_gpu", "coll_algobw_gbs": 277.210914, "coll_busbw_gbs": 485.119099,
        },
    }  # fmt: skip
    return json.dumps(about, separators=(",", ":")) + "\n"


def write(folder: Path, late: int | None = None) -> None:
    rng = np.random.default_rng(3)
    for rank in range(RANKS):
        times = rng.integers(900, 1000, CALLS) + (0 if late is None or rank == late else 2000)
        text = "".join(line(rank, seq, int(time)) for seq, time in enumerate(times))
        (folder / f"gpu-01-pid{70 + rank}.log").write_text(text)


def test_the_rank_that_others_wait_for_is_suspected(tmp_path: Path) -> None:
    write(tmp_path, late=2)
    diagnosis = diagnose_files([tmp_path])
    first = diagnosis.fired[0]
    assert (first.kind, first.status, first.ranks) == ("straggler", "suspect", (2,))
    assert first.evidence["arrives_last_ratio"] == 1.0
    assert 1.9 < first.evidence["peers_wait_more_ms"] < 2.1
    assert_plain(first.summary)
    assert WHY["straggler"](first) == (
        "It was the last to enter 100 % of the collectives and caused 100 % of the waiting in collectives."
    )
    assert diagnosis.run["files_read"] == {"log of NCCL's inspector": RANKS}


def test_equal_ranks_are_not_suspected(tmp_path: Path) -> None:
    write(tmp_path)
    assert diagnose_files([tmp_path]).fired == ()


def test_a_rank_of_a_small_communicator_is_that_of_the_job(tmp_path: Path) -> None:
    write(tmp_path)
    for rank, pid in enumerate((72, 73)):
        with (tmp_path / f"gpu-01-pid{pid}.log").open("a") as file:
            file.writelines(line(rank, n, 9 if rank else 900, group="0xee", pid=pid, size=2) for n in range(CALLS))
    assert diagnose_files([tmp_path]).fired[0].ranks == (3,)


def test_missing_and_damaged_parts_are_named(tmp_path: Path) -> None:
    write(tmp_path, late=2)
    (tmp_path / "gpu-01-pid73.log").unlink()
    with (tmp_path / "gpu-01-pid71.log").open("a") as file:
        file.write('{"header": {"id": 7}}\n[[[[\n{"cut')
    assert format_of(tmp_path / "gpu-01-pid71.log") == "inspector"
    log = read_inspector(tmp_path / "gpu-01-pid71.log")
    assert (log.num_calls, log.damaged_lines) == (CALLS, 3)
    diagnosis = diagnose_files([tmp_path])
    assert diagnosis.fired[0].ranks == (2,)
    assert any("3 of 4 ranks" in finding.summary for finding in diagnosis.findings)


def test_sends_and_counts_of_the_newest_format_are_no_damage(tmp_path: Path) -> None:
    write(tmp_path, late=2)
    for rank in range(RANKS):
        path, about = tmp_path / f"gpu-01-pid{70 + rank}.log", json.loads(line(rank, 0, 1))
        counts = {**about, "dump_stats": {"coll_records": CALLS, "coll_dropped_total": 0}}
        sent = {**about, "p2p_perf": {"p2p": "Send", "p2p_sn": 3, "p2p_peer": 1, "p2p_exec_time_us": 20}}
        del counts["coll_perf"], sent["coll_perf"]
        path.write_text(json.dumps(counts) + "\n" + json.dumps(sent) + "\n" + path.read_text())
        assert format_of(path) == "inspector"
        assert read_inspector(path).damaged_lines == 0
    assert diagnose_files([tmp_path]).fired[0].ranks == (2,)


def scraped(rank: int, seq: int, exec_us: int) -> str:
    about = {
        "comm_id": "0x7f8c", "hostname": "gpu-01", "rank": rank, "slurm_job": "pretrain", "slurm_job_id": 7,
        "nranks": RANKS, "n_nodes": 1, "gpu_device_id": f"GPU{rank}", "collective": "AllReduce", "coll_sn": seq,
        "message_size": "1.00MB",
    }  # fmt: skip
    labels = ",".join(f'{name}="{value}"' for name, value in about.items())
    return f"nccl_bus_bandwidth_gbs{{{labels}}} 485.1\nnccl_collective_exec_time_microseconds{{{labels}}} {exec_us}\n"


def test_files_of_gpus_name_no_process(tmp_path: Path) -> None:
    for rank in range(RANKS):
        text = "".join(scraped(rank, seq, 900 if rank == 2 else 2900) for seq in range(CALLS))
        (tmp_path / f"nccl_inspector_metrics_GPU-{rank}.prom").write_text(text)
    (late,) = diagnose_files([tmp_path]).fired
    assert (late.status, late.ranks, late.evidence["ranks_in_group"]) == ("suspect", (2,), RANKS)


def test_means_of_many_calls_are_named_and_not_judged(tmp_path: Path) -> None:
    labels = 'version="v6.1",slurm_job_id="7",node="gpu-01",gpu="GPU0",comm_name="tp",n_nodes="1",nranks="8",' \
             'collective="AllReduce",message_size="1-2MB",algo_proto="RING_LL"'  # fmt: skip
    path = tmp_path / "nccl_inspector_metrics_GPU-0.prom"
    path.write_text(f"nccl_bus_bandwidth_gbs{{{labels}}} 4\nnccl_collective_exec_time_microseconds{{{labels}}} 90\n")
    diagnosis = diagnose_files([tmp_path])
    assert diagnosis.fired == ()
    assert "means of many calls" in diagnosis.run["file_problems"][0]["problem"]
