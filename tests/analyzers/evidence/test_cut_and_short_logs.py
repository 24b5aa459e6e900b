"""Logs that end within a report, are short, or lines of which a paste broke: the verdict says what is left of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.diagnose import Diagnosis
from analyzers.evidence.diagnose_files import diagnose_files
from analyzers.report.wording.explained import next_step, why

REPORT = (
    "[rank{rank}]:[E ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=77, OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096, Timeout(ms)=600000) ran for 600021 "
    "milliseconds before timing out.\n"
)


def diagnosed(folder: Path, text: str) -> Diagnosis:
    (folder / "train.log").write_text(text)
    return diagnose_files([folder / "train.log"])


@pytest.mark.parametrize("broken", ["OpType=", "OpTy\npe="])
@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_ranks_are_not_missing_from_a_list_that_the_files_end_cuts(tmp_path: Path, end: str, broken: str) -> None:
    whole = "".join(REPORT.format(rank=rank) for rank in (0, 2, 3, 5, 6))
    (found,) = diagnosed(tmp_path, whole).fired
    assert (found.cause, found.ranks) == ("not_entered", (1, 4))
    cut = REPORT.format(rank=1).replace("OpType=", broken)
    (found,) = diagnosed(tmp_path, whole + cut[: cut.index("REDUCE, ")] + end).fired
    assert (found.cause, found.ranks) == ("all_entered", ())
    assert "rank 4 printed nothing" in found.summary


def test_the_next_line_completes_a_report_that_a_paste_broke(tmp_path: Path) -> None:
    lines = [REPORT.format(rank=rank) for rank in (0, 2, 3, 1)]
    lines[-1] = lines[-1].replace("OpType=", "OpTy\npe=")
    (found,) = diagnosed(tmp_path, "".join(lines)).fired
    assert (found.cause, found.ranks, found.evidence["waiting_ranks"]) == ("all_entered", (), [0, 1, 2, 3])


@pytest.mark.parametrize(
    "frame", ["/opt/env/bin/torchrun", "/opt/env/lib/python3.11/site-packages/torch/distributed/run.py"]
)
def test_a_launchers_traceback_that_the_files_end_cuts_does_not_hide_the_exit_above_it(
    tmp_path: Path, frame: str
) -> None:
    text = "E0301 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: 3) local_rank: 2 (pid: 71) "
    text += (
        f'of binary: /opt/env/bin/python\nTraceback (most recent call last):\n  File "{frame}", line 8, in <module>\n'
    )
    (found,) = diagnosed(tmp_path, text + "    sys.exit(main())\n").fired
    assert (found.cause, found.ranks, found.evidence["exit_code"]) == ("exit", (2,), 3)


def test_gloo_on_loopback_is_the_wrong_interface_where_its_mesh_fails(tmp_path: Path) -> None:
    warning = "[W ProcessGroupGloo.cpp:812] Warning: Unable to resolve hostname to a (local) address. Using the "
    warning += "loopback\naddress as fallback. Manually set the network interface with GLOO_SOCKET_IFNAME\n"
    mesh = "RuntimeError: Gloo connectFullMesh failed with [pair.cc:152] timed out\n"
    (found,) = diagnosed(tmp_path, warning + mesh).fired
    assert (found.cause, found.ranks) == ("no_interface", ())
    assert "GLOO_SOCKET_IFNAME" in str(found.evidence["do"])
    assert diagnosed(tmp_path, warning + "step 1 loss 2.0\nstep 2 loss 1.9\nTraining finished.\n").fired == ()


def means(*speeds: float, every: int = 50) -> str:
    lines = (f"Speed {speed:.2f} samples/sec   Loss {40 - place}   Global Step: {every * place}\n"
             for place, speed in enumerate(speeds, 1))  # fmt: skip
    return "".join(lines)


FAST = (1473.0, 1548.3, 1507.5, 1517.1, 1540.3, 1530.7, 1534.2)


def test_a_drop_shows_in_a_few_lines_that_are_means_of_many_steps(tmp_path: Path) -> None:
    (found,) = diagnosed(tmp_path, means(*FAST, 905.0, 485.2, 487.6)).fired
    assert (found.kind, found.first_step) == ("throughput", 450)
    assert why(found) == "Every line after this step prints a lower throughput than the lines before it."


@pytest.mark.parametrize("text", [means(*FAST, 905.0, 1520.0, 1498.0), means(*FAST, 905.0),
                                  means(*FAST, 1322.0, 1318.0), means(*FAST, 485.2, 487.6, every=1)])  # fmt: skip
def test_one_slow_line_a_small_drop_and_single_steps_are_not_reported(tmp_path: Path, text: str) -> None:
    assert diagnosed(tmp_path, text).fired == ()


def test_a_checkpoint_that_cannot_be_opened_is_an_error_of_the_file_system(tmp_path: Path) -> None:
    text = (
        'Traceback (most recent call last):\n  File "/job/train.py", line 9, in <module>\n    torch.save(state, path)\n'
        "RuntimeError: File out/checkpoint_0.pt cannot be opened.\n"
    )
    assert [one.cause for one in diagnosed(tmp_path, text).fired] == ["file_system"]


def clocked(num: int, *, stamped: bool, slow_from: int = 1000) -> str:
    """Lines of a program whose `Time` is the time since its start; a step takes a second."""
    lines, elapsed = [], 0
    for step in range(1, num + 1):
        elapsed += 1 + 2 * (step >= slow_from)
        stamp = f"2026-11-26 10:{elapsed // 60:02d}:{elapsed % 60:02d},000 - INFO - " if stamped else ""
        lines.append(f"{stamp}Iter [{step}/400] || Time: {100 + elapsed}.0 sec || Loss: {4 - step / 100:.4f}\n")
    return "".join(lines)


@pytest.mark.parametrize("stamped", [True, False])
def test_the_time_since_the_start_is_no_duration_of_a_step(tmp_path: Path, stamped: bool) -> None:
    assert diagnosed(tmp_path, clocked(600, stamped=stamped)).fired == ()


def test_a_drop_shows_between_the_times_of_lines_that_print_the_time_since_the_start(tmp_path: Path) -> None:
    (found,) = diagnosed(tmp_path, clocked(300, stamped=True, slow_from=150)).fired
    assert found.kind == "throughput"
    assert abs((found.first_step or 0) - 150) <= 5


def test_the_evaluation_loss_of_an_estimator_is_not_a_training_loss(tmp_path: Path) -> None:
    lines = (f"INFO:tensorflow:loss = {0.5 - step / 250:.4f}, step = {100 * step} (14 sec)\n" for step in range(1, 120))
    steps = "".join(lines)
    end = "INFO:tensorflow:Saving dict for global step 12000: accuracy = 0.85, global_step = 12000, loss = 0.7218\n"
    assert diagnosed(tmp_path, steps + end).fired == ()


LISTED = "{host}:71:71 [0] NCCL INFO NET/Socket : Using [0]eno1:10.0.0.{n}<0> [1]{other}:172.18.0.1<0>\n"
SYSTEM = "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:957, unhandled system error, NCCL version 2.19.3\n"


def _listed(other: str, num_hosts: int) -> str:
    return "".join(LISTED.format(host=f"gpu-{n}", n=n, other=other) for n in range(num_hosts))


@pytest.mark.parametrize("other", ["br-7f00aa", "vethe1c2", "docker1", "virbr0"])
def test_a_failed_call_over_interfaces_of_containers_suspects_them(tmp_path: Path, other: str) -> None:
    (finding,) = diagnosed(tmp_path, _listed(other, 2) + SYSTEM).fired
    assert (finding.cause, finding.status, finding.ranks) == ("no_interface", "suspect", ())
    assert other in finding.summary
    assert "NCCL_SOCKET_IFNAME" in next_step(finding)


@pytest.mark.parametrize("text", [_listed("ib0", 2) + SYSTEM, _listed("docker1", 1) + SYSTEM,
                                  _listed("docker1", 2) + SYSTEM.replace("system", "cuda")])  # fmt: skip
def test_other_interfaces_and_other_errors_suspect_none(tmp_path: Path, text: str) -> None:
    assert [one.cause for one in diagnosed(tmp_path, text).fired] == ["nccl_error"]
