"""Reports of devices at one moment: nvidia-smi -q as text and XML, scrapes of GPU exporters, dcgmi dmon, npu-smi."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from store.readers.programs import gpu_scrape, nvidia_smi_query
from store.readers.programs.registry import program_of
from tests.analyzers.evidence.written import diagnosed

QUERY = """\

==============NVSMI LOG==============

Timestamp                                 : Tue Mar  3 09:20:11 2026
Attached GPUs                             : 1
GPU 00000000:4E:00.0
    MIG Devices
        MIG Device
            ECC Errors
                Volatile
                    SRAM Uncorrectable    : 12
    ECC Errors
        Volatile
{volatile}
        Aggregate
            DRAM Uncorrectable            : 40
            Double Bit
                Total                     : 40
"""
NEW = """\
            SRAM Correctable              : 3
            SRAM Uncorrectable Parity     : 1
            SRAM Uncorrectable            : 0
            DRAM Correctable              : 4
            DRAM Uncorrectable            : {bad}"""
OLD = """\
            Single Bit
                Device Memory             : 7
                Total                     : 7
            Double Bit
                Device Memory             : {bad}
                Total                     : {bad}"""
XML = """\
<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
\t<timestamp>Tue Mar  3 09:20:11 2026</timestamp>
\t<gpu id="00000000:4E:00.0">
\t\t<mig_devices>
\t\t\t<mig_device>
\t\t\t\t<ecc_error_count><volatile_count><sram_uncorrectable>9</sram_uncorrectable></volatile_count></ecc_error_count>
\t\t\t</mig_device>
\t\t</mig_devices>
\t\t<uuid>GPU-4e</uuid>
\t\t<clocks_event_reasons>
\t\t\t<clocks_event_reason_hw_thermal_slowdown>{hot}</clocks_event_reason_hw_thermal_slowdown>
\t\t</clocks_event_reasons>
\t\t<utilization>
\t\t\t<gpu_util>97 %</gpu_util>
\t\t</utilization>
\t\t<ecc_errors>
\t\t\t<volatile>
\t\t\t\t<dram_correctable>7</dram_correctable>
\t\t\t\t<dram_uncorrectable>{bad}</dram_uncorrectable>
\t\t\t</volatile>
\t\t\t<aggregate>
\t\t\t\t<dram_uncorrectable>40</dram_uncorrectable>
\t\t\t</aggregate>
\t\t</ecc_errors>
\t\t<remapped_rows>
\t\t\t<remapped_row_pending>No</remapped_row_pending>
\t\t\t<remapped_row_failure>{failed}</remapped_row_failure>
\t\t</remapped_rows>
\t\t<temperature>
\t\t\t<gpu_temp>88 C</gpu_temp>
\t\t</temperature>
\t\t<clocks>
\t\t\t<sm_clock>1200 MHz</sm_clock>
\t\t</clocks>
\t</gpu>
</nvidia_smi_log>
"""


@pytest.mark.parametrize(("volatile", "bad"), [(NEW, 11), (OLD, 12)])
def test_volatile_errors_are_suspected_and_lifetime_errors_are_not(tmp_path: Path, volatile: str, bad: int) -> None:
    path = tmp_path / "nvidia-smi-gpu-07.txt"
    path.write_text(QUERY.format(volatile=volatile.format(bad=bad)))
    (row,) = nvidia_smi_query.read(path).health
    assert (row["ecc_corrected_total"], row["ecc_uncorrected_total"]) == (7, 12)
    (found,) = diagnose_files([path]).fired
    assert (found.status, found.kind, found.cause) == ("suspect", "gpu_memory_errors", "uncorrected")
    assert "00000000:4E:00.0 of gpu-07: 12 uncorrectable ECC errors" in found.summary
    path.write_text(QUERY.format(volatile=OLD.format(bad=0)))
    assert diagnose_files([path]).fired == ()


def test_the_xml_of_nvidia_smi_is_read_as_its_text(tmp_path: Path) -> None:
    path = tmp_path / "smi.xml"
    path.write_text(XML.format(hot="Active", bad=0, failed="Yes"))
    (row,) = nvidia_smi_query.read(path).health
    assert row | {"node": "", "rank": -1, "sample_ns": 0} == {
        "node": "", "rank": -1, "sample_ns": 0, "device": "GPU-4e", "throttle_reasons": 0x40,
        "gpu_utilization_ratio": 0.97, "ecc_corrected_total": 7, "ecc_uncorrected_total": 0, "remap_pending": False,
        "remap_failed": True, "temperature_celsius": 88.0, "sm_clock_hertz": 1.2e9,
    }  # fmt: skip
    assert {one.cause for one in diagnose_files([path]).fired} == {"remap_failed", "thermal"}
    path.write_text(XML.format(hot="Not Active", bad=0, failed="No"))
    assert diagnose_files([path]).fired == ()


def test_a_lost_gpu_is_found_whatever_columns_were_queried(tmp_path: Path) -> None:
    text = "index, name, pci.bus_id, memory.used [MiB]\n0, H100, 00000000:1B:00.0, 575 MiB\n"
    assert diagnosed(tmp_path, "smi.csv", f"{text}1, H100, 00000000:4E:00.0, 575 MiB\n").fired == ()
    (lost,) = diagnosed(tmp_path, "smi.csv", f"{text}1, H100, 00000000:4E:00.0, [GPU is lost]\n").fired
    assert "00000000:4E:00.0" in lost.summary


def scrape(**values: object) -> str:
    labels = 'gpu="3",UUID="GPU-33",pci_bus_id="00000000:4E:00.0",Hostname="gpu-07"'
    lines = [f"DCGM_FI_DEV_{name}{{{labels}}} {value}" for name, value in values.items()]
    return "\n".join(
        ["# TYPE DCGM_FI_DEV_GPU_UTIL gauge", *lines, f'DCGM_FI_DEV_GPU_UTIL{{{labels},GPU_I_ID="2"}} 5', ""]
    )


def test_scrapes_of_an_exporter_are_readings_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.prom"
    text = [scrape(GPU_UTIL=97, GPU_TEMP=61, ECC_DBE_VOL_TOTAL=errors, MEMORY_TEMP=2**63 - 14, XID_ERRORS=0)
            for errors in (0, 0, 2)]  # fmt: skip
    path.write_text("".join(text))
    rows = gpu_scrape.read(path).health
    assert [row["ecc_uncorrected_total"] for row in rows] == [0, 0, 2]
    assert len({row["sample_ns"] for row in rows}) == 3
    assert {row["gpu_utilization_ratio"] for row in rows} == {0.97}
    (found,) = diagnose_files([path]).fired
    assert found.status == "fired"
    assert found.summary == "GPU-33 of gpu-07: 2 uncorrectable ECC errors."
    path.write_text(path.read_text().replace("gpu-07", "dcgm-exporter-x7k2p"))
    assert gpu_scrape.read(path).health[0]["node"] == "an unnamed host"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("scrape.txt", scrape(GPU_UTIL=0, XID_ERRORS=79) * 2),
        ("dcgmi-dmon-gpu-07.txt", "#Entity   GPUTL  XIDER\nID\n" + "GPU 3     0      79\n" * 2),
    ],
)
def test_the_last_xid_of_a_gauge_is_suspected_since_it_has_no_time(tmp_path: Path, name: str, text: str) -> None:
    (found,) = diagnosed(tmp_path, name, text).fired
    assert (found.status, found.kind, found.cause) == ("suspect", "rank_lost", "device_error")
    assert "of gpu-07 may have failed: its last error, at an unknown time, is XID 79" in found.summary
    assert diagnosed(tmp_path, name, text.replace("79", "0")).fired == ()
    (program,) = diagnosed(tmp_path, name, text.replace("79", "31")).fired
    assert program.summary.startswith("The last XID of GPU ")
    assert "of gpu-07, at an unknown time, is 31" in program.summary


def test_scrapes_of_other_programs_are_refused() -> None:
    assert program_of(b"# HELP go_goroutines Number\n# TYPE go_goroutines gauge\ngo_goroutines 12\n") is None


NPUS = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc3                 Version: 24.1.rc3                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 297.5       51                0    / 0             |
| 0                         | 0000:C1:00.0  | 92          0    / 0          60379/ 65536         |
+===========================+===============+====================================================+
| 1     910B3               | {health:13} | 93.9        40                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          60385/ 65536         |
+===========================+===============+====================================================+
"""


def test_an_npu_that_is_not_healthy_is_suspected(tmp_path: Path) -> None:
    (found,) = diagnosed(tmp_path, "npu-smi-npu-04.txt", NPUS.format(health="Alarm")).fired
    assert found.status == "suspect"
    assert "npu-smi reports the health of NPU 1 of npu-04 (910B3) as Alarm" in found.summary
    path = tmp_path / "npu-smi-npu-04.txt"
    path.write_text(NPUS.format(health="OK"))
    assert diagnose_files([path]).fired == ()


def test_the_text_node_is_not_ready_does_not_name_a_node(tmp_path: Path) -> None:
    text = "6m   Warning   NodeNotReady   pod/worker-3   Node is not ready\n"
    (found,) = diagnosed(tmp_path, "events.txt", "LAST SEEN  TYPE  REASON  OBJECT  MESSAGE\n" + text).fired
    assert "(is)" not in found.summary
    text += "6m   Normal   NodeNotReady   node/gpu-17   Node gpu-17 status is now: NodeNotReady\n"
    (found,) = diagnosed(tmp_path, "events.txt", text).fired
    assert "gpu-17" in found.summary


def test_a_gpu_with_its_address_in_three_notations_is_counted_once(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi-gpu-03.txt").write_text(
        "Unable to determine the device handle for GPU0000:4E:00.0: Unknown Error\n"
    )
    (tmp_path / "dmesg-gpu-03.txt").write_text(
        "[Wed Nov 26 10:21:03 2026] NVRM: Xid (PCI:0000:4e:00): 79, pid=4242, name=python, GPU has fallen.\n"
        "[Wed Nov 26 10:21:03 2026] NVRM: GPU 0000:4e:00.0: GPU has fallen off the bus.\n"
    )
    (found,) = diagnose_files([tmp_path]).fired
    assert "of gpu-03 lost its GPU: the kernel reports XID 79" in found.summary


LINKS = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-11)
\t Link 0: 26.562 GB/s
\t Link 1: {0}
\t Link 2: <inactive>
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-22)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
\t Link 2: <inactive>
"""


def test_a_gpu_with_fewer_nvlinks_than_the_others_is_suspected(tmp_path: Path) -> None:
    (found,) = diagnosed(tmp_path, "nvidia-smi-gpu-07.txt", LINKS.format("<inactive>")).fired
    assert found.status == "suspect"
    assert "2 NVLinks of GPU 0 of gpu-07 (1, 2) are inactive, against 1 on other GPUs" in found.summary
    assert diagnosed(tmp_path, "nvidia-smi-gpu-07.txt", LINKS.format("26.562 GB/s")).fired == ()
