"""Lines of a kernel that show a fault of a host and no end of a job: reported as what they are, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.report.wording.explained import next_step
from tests.analyzers.evidence.written import diagnosed

AT = "[Mon Apr  6 07:10:00 2026] "
XID = AT + "NVRM: Xid (PCI:0000:1a:00): 31, pid=9021, name=python3, Ch 00000002, MMU Fault: ENGINE GRAPHICS\n"
BLOCKED = AT + "INFO: task python3:9021 blocked for more than 241 seconds.\n"
HEAT = AT + "mce: CPU7: Package temperature above threshold, cpu clock throttled (total events = 2210)\n"
PORT = AT + "mlx5_core 0000:5e:00.1: Port module event[error]: module 1, Cable error, Bus stuck\n"
DOWN = AT + "mlx5_core 0000:5e:00.1 ib1: Link down\n"
UP = AT + "mlx5_core 0000:5e:00.1 ib1: Link up\n"
DOWN_OF_PORT = AT + "mlx5_core 0000:5e:00.1 mlx5_3: Port: 1 Link DOWN\n"
IBSTAT = (
    "CA 'mlx5_3'\n\tCA type: MT4129\n\tPort 1:\n\t\tState: {state}\n\t\tPhysical state: {physical}\n\t\tRate: 10\n"
    "\t\tLink layer: {layer}\n"
)
POLLS = IBSTAT.format(state="Down", physical="Polling", layer="InfiniBand")
RUNS = IBSTAT.format(state="Active", physical="LinkUp", layer="InfiniBand")
OPENSM = "Mar 01 10:00:00 927893 [4F2006C0] 0x02 -> "
SWITCH = (
    OPENSM + "osm_spst_rcv_process: Switch 0xb0cf0e03 MF0;leaf-4:QM87/U1 port 9 (sw7p1) changed state from {} to {}\n"
)
REMOVED = OPENSM + "drop_mgr_remove_port: Removed port with GUID:0x0020a1 LID range [3, 3] of node:gpu-12 HCA-2\n"
SLOWED = "monitor: gpu 5: HW Thermal Slowdown is active at 93 C\n"
STEPS = "".join(f"step {{}}{number} loss {2 - number / 10:.2f} time 0.5\n" for number in range(1, 6))


@pytest.mark.parametrize(
    ("text", "kind", "cause", "words"),
    [
        (XID, "xid", "application", "XID 31 on GPU 0000:1a:00, process python3 (9021)"),
        (BLOCKED, "host_pressure", "blocked", "python3 (9021) blocked for more than 241 s"),
        (HEAT, "host_pressure", "heat", "throttled 1 CPU because of heat, up to 2,210 times"),
        (HEAT.replace("mce: ", ""), "host_pressure", "heat", "The kernel throttled 1 CPU"),
        (PORT, "link_errors", "infiniband_down", "module 1, Cable error, Bus stuck"),
        (DOWN, "link_errors", "infiniband_down", "ib1 went down."),
        (AT + "ibs3: link down\n", "link_errors", "infiniband_down", "The link ibs3 went down."),
        (DOWN_OF_PORT, "link_errors", "infiniband_down", "mlx5_3 went down."),
        (
            RUNS.replace("_3", "_2") + POLLS,
            "link_errors",
            "infiniband_down",
            "Port mlx5_3 reports a fault: down (physical",
        ),
        ("hca_id:\tmlx5_1\n\tport:\t1\n\t\tstate:\t\tPORT_DOWN (1)\n", "link_errors", "infiniband_down", "mlx5_1"),
        (
            "Infiniband device 'ib7' port 1 status:\n\tstate:\t 1: DOWN\n\tphys state:\t 2: Polling\n",
            "link_errors",
            "infiniband_down",
            "ib7 reports a fault: down (physical state: Polling)",
        ),
        (SWITCH.format("ACTIVE", "DOWN"), "link_errors", "infiniband_down", "leaf-4:QM87/U1 port 9 went down"),
        (REMOVED, "link_errors", "infiniband_down", "The link gpu-12 HCA-2 went down."),
        (SLOWED, "gpu_throttled", "thermal", "was slowed down: HW Thermal Slowdown"),
    ],
)
def test_a_line_alone_is_reported_and_no_rank_is_lost(
    tmp_path: Path, text: str, kind: str, cause: str, words: str
) -> None:
    (found,) = diagnosed(tmp_path, "kern.log", text).fired
    assert (found.kind, found.cause, found.severity, found.ranks) == (kind, cause, "warning", ())
    assert words in found.summary


@pytest.mark.parametrize("line", [XID, BLOCKED, HEAT, PORT, DOWN, POLLS, SLOWED])
def test_a_warning_that_the_job_survived_is_a_remark(tmp_path: Path, line: str) -> None:
    went_on = STEPS.format(*[""] * 5) + line + STEPS.format(*["1"] * 5)
    assert diagnosed(tmp_path, "job.log", went_on).fired == ()


@pytest.mark.parametrize(
    "line",
    [
        DOWN + UP, PORT.replace("Cable error, Bus stuck", "Cable plugged"), UP, RUNS,
        DOWN_OF_PORT + DOWN_OF_PORT.replace("DOWN", "ACTIVE"),
        IBSTAT.format(state="Down", physical="Disabled", layer="Ethernet"),
        SWITCH.format("ACTIVE", "DOWN") + SWITCH.format("INIT", "ACTIVE"),
    ],
)  # fmt: skip
def test_a_link_that_came_up_is_not_a_fault(tmp_path: Path, line: str) -> None:
    assert diagnosed(tmp_path, "kern.log", line).fired == ()


@pytest.mark.parametrize("line", ["HW Slowdown : Not Active\n", "Set hw_slowdown: false\n", "HW Slowdown: 0\n"])
def test_an_inactive_throttle_reason_gives_no_finding(tmp_path: Path, line: str) -> None:
    assert diagnosed(tmp_path, "monitor.log", line * 3).fired == ()


def test_an_error_of_the_job_stands_before_a_warning_of_the_kernel(tmp_path: Path) -> None:
    raised = "Traceback (most recent call last):\n  File \"/job/a.py\", line 3, in <module>\n    run()\nKeyError: 'x'\n"
    (found,) = diagnosed(tmp_path, "job.log", BLOCKED + raised).fired
    assert (found.kind, found.cause) == ("rank_lost", "exception")


def test_a_link_that_went_down_explains_a_lost_connection(tmp_path: Path) -> None:
    lost = "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.1.0.7]:2331\n"
    assert diagnosed(tmp_path, "job.log", DOWN + lost).fired[0].cause == "link_down"


def test_a_report_with_nothing_but_reasons_of_slowdown_is_read(tmp_path: Path) -> None:
    report = "==============NVSMI LOG==============\n\nGPU 00000000:1A:00.0\n    Clocks Event Reasons\n"
    report += "        Idle : Not Active\n        HW Slowdown : Active\n            HW Thermal Slowdown : {}\n"
    assert diagnosed(tmp_path, "smi.txt", report.format("Active")).fired[0].kind == "gpu_throttled"


def test_a_failure_handler_that_names_no_address_reports_the_signal(tmp_path: Path) -> None:
    text = "*** SIGSEGV (@(nil)), see go/stack#s15 received by PID 771 (TID 790) on cpu 3; stack trace: ***\n"
    assert "SIGSEGV" in diagnosed(tmp_path, "job.log", text).fired[0].summary
    raw = "E0406 07:10:01.100000    771 dump_hook.cc:47] RAW: A hook was invoked.\n"
    assert diagnosed(tmp_path, "job.log", raw).fired == ()


CODE = "[ 8123.100231] NVRM: Xid (PCI:0000:4e:00): {text}\n"


@pytest.mark.parametrize(
    "text",
    [
        "63, pid=0, Row Remapper: a row is marked",
        "92, pid=0, many single-bit errors",
        "145, RLW_RXPIPE Nonfatal XC0 i0 Link 11 (0x1 0x2)",
    ],
)
def test_an_error_that_the_device_has_dealt_with_ends_no_rank(tmp_path: Path, text: str) -> None:
    (finding,) = diagnosed(tmp_path, "dmesg.txt", CODE.format(text=text)).fired
    assert (finding.kind, finding.severity) == ("xid", "warning")
    assert finding.summary.startswith(f"XID {text.split(',')[0]} on GPU 0000:4e:00")


@pytest.mark.parametrize(
    ("text", "said", "advice"),
    [
        ("94, pid=71, name=python, Contained: SM", "met an error of its GPU", "Start the run again. "),
        ("74, pid=71, NVLink: fatal error detected on link 2", "met an error of its GPU", "Run nvidia-smi nvlink -s"),
        ("149, NETIR Fatal XC0 i0 Link 02 (0x1 0x2)", "lost its GPU", "nvidia-smi --gpu-reset"),
        ("79, pid=71, GPU has fallen off the bus.", "lost its GPU", "Reboot the host"),
        ("999, pid=71, a code of a later driver", "met an error of its GPU", "ECC,ROW_REMAPPER"),
    ],
)
def test_a_gpu_is_lost_only_if_it_has_to_be_reset(tmp_path: Path, text: str, said: str, advice: str) -> None:
    finding = diagnosed(tmp_path, "dmesg.txt", CODE.format(text=text)).fired[0]
    assert (finding.kind, finding.cause) == ("rank_lost", "device_error")
    assert f"The rank on GPU 0000:4e:00 {said}: the kernel reports XID {text.split(',')[0]}" in finding.summary
    assert advice in next_step(finding)


def test_an_adapter_whose_firmware_stopped_is_quoted_whole(tmp_path: Path) -> None:
    line = "[ 198.853543] mlx5_core 0000:5e:00.0: device's health compromised - reached miss count\n"
    assert "mlx5_core 0000:5e:00.0: device's health" in diagnosed(tmp_path, "dmesg.txt", line).fired[0].summary
