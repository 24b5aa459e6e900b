"""Readings of the host, of NVML's answers, and of a dcgm-exporter."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from probes.tape.format.schema import TABLES
from tests.fakes import FakeNvml
from watch.health.dcgm import FIELDS, Dcgm
from watch.health.device import HOST, ReadingError, Xid
from watch.health.host import Host
from watch.health.nvml import Nvml, Xids

COLUMNS = {column.name for column in TABLES["health"].columns}
ROOT = Path(__file__).resolve().parents[3]


def test_this_host(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.read()
    ((device, values),) = [(reading.device, reading.values) for reading in host.read()]
    assert device == HOST
    assert set(values) <= COLUMNS
    assert 0 < values["memory_used_bytes"] < values["memory_total_bytes"]
    assert values["num_cpus"] >= 1
    assert values["disk_free_bytes"] > 0
    assert values["load_1m"] >= 0


def files(root: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_host_in_figures(tmp_path: Path) -> None:
    root = files(
        tmp_path,
        proc__stat="cpu 100 0 50 800 50 0 0 0 0 0\n",
        proc__meminfo="MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 400 kB\n",
        proc__loadavg="3.50 1 1 5/300 1\n",
        proc__vmstat="pswpin 3\npswpout 4\npgfault 9\n",
        proc__net__dev="Inter-|\n face |\n lo: 0 0 9 9 0 0 0 0 0 0 9 9\n eth0: 7 7 1 2 0 0 0 0 7 7 3 4 0 0 0 0\n",
    )
    host = Host(tmp_path, root)
    assert "cpu_utilization_ratio" not in host.read()[0].values  # a share needs two readings
    files(tmp_path, proc__stat="cpu 170 0 60 810 60 0 0 0 0 0\n")
    values = host.read()[0].values
    assert values["cpu_utilization_ratio"] == pytest.approx(0.8)
    assert (values["memory_used_bytes"], values["memory_total_bytes"]) == (600 << 10, 1000 << 10)
    assert (values["swapped_pages_total"], values["network_errors_total"], values["load_1m"]) == (7, 10, 3.5)


def test_counters_of_links_pressure_and_cgroup(tmp_path: Path) -> None:
    """Two ports are summed; a file that is no number, or not there, is left out."""
    root = files(
        tmp_path,
        proc__net__snmp="Ip: A\nIp: 1\nTcp: OutSegs RetransSegs\nTcp: 900 8\n",
        proc__pressure__memory="some avg10=12.50 avg60=1.00 avg300=0.10 total=99\nfull avg10=1.00\n",
        proc__pressure__io="some avg10=nothing\n",
    )
    files(root / "sys/fs/cgroup", cpu_DOT_stat="usage_usec 9\nnr_throttled 3\nthrottled_usec 2500000\n")
    for name, downs, errors in (("mlx5_0", "2", "5"), ("mlx5_1", "1", "N/A (no PMA)")):
        port = root / "sys/class/infiniband" / name / "ports/1"
        (port / "counters").mkdir(parents=True)
        (port / "hw_counters").mkdir()
        (port / "counters/link_downed").write_text(downs)
        (port / "counters/symbol_error").write_text(errors)
        (port / "hw_counters/rp_cnp_handled").write_text("40\n")
    values = Host(tmp_path, root).read()[0].values
    ours = ("tcp", "infiniband", "cgroup", "memory_pressure")
    assert {name: value for name, value in values.items() if name.startswith(ours)} == {
        "cgroup_throttled_seconds_total": 2.5, "infiniband_congestion_total": 80, "infiniband_downs_total": 3,
        "infiniband_errors_total": 5, "memory_pressure_ratio": 0.125, "tcp_retransmits_total": 8,
        "tcp_segments_total": 900,
    }  # fmt: skip
    assert not {"io_pressure_ratio", "cpu_pressure_ratio"} & set(values)


DISKS = """\
   8       0 sda {reads} 5 8 {read_ms} {writes} 7 8 {write_ms} 0 50 60
   8       1 sda1 {reads} 5 8 {read_ms} 0 7 8 0 0 50 60
 259       0 nvme0n1 100 0 8 50 40 0 8 30 0 50 60 0 0 0 0 0 0
 253       0 dm-0 {reads} 0 8 999999 9 0 8 9 0 50 60
   7       0 loop0 none
"""


def test_latency_of_the_slowest_disk(tmp_path: Path) -> None:
    """Partitions and what lies on top of disks do not count; a disk with too few requests says nothing."""
    for disk in ("sda", "nvme0n1"):
        (tmp_path / "sys/block" / disk / "device").mkdir(parents=True)
    (tmp_path / "sys/block/dm-0").mkdir()
    host = Host(tmp_path, files(tmp_path, proc__diskstats=DISKS.format(reads=10, read_ms=90, writes=4, write_ms=8)))

    def latency() -> dict[str, float]:
        return {
            name: value for name, value in host.read()[0].values.items() if name.startswith("disk_") and "lat" in name
        }

    assert latency() == {}, "two readings are a latency"
    files(tmp_path, proc__diskstats=DISKS.format(reads=30, read_ms=490, writes=8, write_ms=9000))
    assert latency() == {"disk_read_latency_seconds": pytest.approx(0.02)}, "four writes are too few"
    files(tmp_path, proc__diskstats=DISKS.format(reads=30, read_ms=490, writes=18, write_ms=9500))
    assert latency() == {"disk_write_latency_seconds": pytest.approx(0.05)}
    files(tmp_path, proc__diskstats=DISKS.format(reads=1, read_ms=2, writes=0, write_ms=0))
    assert latency() == {}, "counters that began anew"


def test_counters_of_an_efa_adapter(tmp_path: Path) -> None:
    counted = {"rdma_read_wr_err": 1, "unresponsive_remote_events": 2, "retrans_timeout_events": 5,
               "impaired_remote_conn_events": 3, "rx_drops": 70, "tx_pkts": 900}  # fmt: skip
    folder = tmp_path / "sys/class/infiniband/rdmap0s31/ports/1/hw_counters"
    folder.mkdir(parents=True)
    for name, value in counted.items():
        (folder / name).write_text(f"{value}\n")
    values = Host(tmp_path, tmp_path).read()[0].values
    assert {name: value for name, value in values.items() if name.startswith("infiniband")} == {
        "infiniband_congestion_total": 8, "infiniband_errors_total": 3,
    }  # fmt: skip


def test_a_cgroup_without_a_limit_has_no_time_stopped_by_it(tmp_path: Path) -> None:
    files(tmp_path / "sys/fs/cgroup", cpu_DOT_stat="usage_usec 9\nnr_periods 0\nnr_throttled 0\nthrottled_usec 0\n")
    assert "cgroup_throttled_seconds_total" not in Host(tmp_path, tmp_path).read()[0].values
    files(tmp_path / "sys/fs/cgroup", cpu_DOT_stat="usage_usec 9\nnr_periods 5\nnr_throttled 0\nthrottled_usec 0\n")
    assert Host(tmp_path, tmp_path).read()[0].values["cgroup_throttled_seconds_total"] == 0


def test_in_a_container_memory_is_that_of_its_cgroup(tmp_path: Path) -> None:
    root = files(tmp_path, proc__meminfo="MemTotal: 1000 kB\nMemAvailable: 900 kB\n",
                 sys__fs__cgroup__memory_DOT_max="512000\n", sys__fs__cgroup__memory_DOT_current="400000\n",
                 sys__fs__cgroup__memory_DOT_stat="anon 1\ninactive_file 100000\n")  # fmt: skip
    values = Host(tmp_path, root).read()[0].values
    assert (values["memory_used_bytes"], values["memory_total_bytes"]) == (300000, 512000)


@pytest.mark.parametrize("text", ["", "cpu\n", "\x00\xff", "cpu 1 2\n"])
def test_a_kernel_that_says_nothing_costs_that_column_only(tmp_path: Path, text: str) -> None:
    root = files(tmp_path, proc__stat=text, proc__meminfo=text, proc__vmstat=text)
    assert set(Host(tmp_path, root).read()[0].values) == {"num_cpus", "disk_free_bytes"}


def test_all_fields_of_a_gpu_with_their_units() -> None:
    gpus = Nvml(FakeNvml())
    first, _ = gpus.read()
    assert first.device == "GPU-0"
    assert "sm_active_ratio" not in first.values  # it is a share since the reading before
    first, second = gpus.read()
    assert first.values == {
        "gpu_utilization_ratio": 0.97, "memory_used_bytes": 70 << 30, "memory_total_bytes": 80 << 30,
        "temperature_celsius": 64, "power_watts": 612.5, "energy_joules": 5000, "sm_clock_hertz": 1.98e9,
        "throttle_reasons": 4, "ecc_corrected_total": 12, "ecc_uncorrected_total": 0, "remapped_rows_total": 3,
        "remap_pending": False, "remap_failed": False, "pcie_replay_total": 3, "nvlink_errors_total": 16,
        "sm_active_ratio": 0.2, "tensor_active_ratio": 0.5, "memory_bandwidth_ratio": 1.0,
    }  # fmt: skip
    assert set(first.values) <= COLUMNS
    assert "sm_active_ratio" not in second.values  # GPM is of Hopper and later


def test_gpm_samples_are_given_back() -> None:
    nvml = FakeNvml(("GPU-0",))
    gpus = Nvml(nvml)
    for _ in range(10):
        gpus.read()
    assert nvml.freed == 9
    nvml.failing["nvmlGpmSampleGet"] = 999
    for _ in range(10):
        gpus.read()
    assert nvml.asked["nvmlGpmSampleAlloc"] == 20
    assert nvml.freed == 19, "samples that could not be taken as well"


def test_what_is_not_supported_is_asked_for_once_and_left_out() -> None:
    nvml = FakeNvml(("GPU-1",))
    nvml.failing["nvmlDeviceGetRemappedRows"] = nvml.NVML_ERROR_NOT_SUPPORTED
    nvml.failing["nvmlDeviceGetPowerUsage"] = 999  # for this moment only
    gpus = Nvml(nvml)
    values = gpus.read()[0].values
    assert not {"remapped_rows_total", "remap_pending", "power_watts"} & set(values)
    assert values["temperature_celsius"] == 64
    del nvml.failing["nvmlDeviceGetPowerUsage"]
    assert "power_watts" in gpus.read()[0].values
    assert nvml.asked["nvmlDeviceGetRemappedRows"] == 1


def test_links_without_counters_are_not_links_without_errors() -> None:
    nvml = FakeNvml(("GPU-0",))
    nvml.failing["nvmlDeviceGetNvLinkErrorCounter"] = nvml.NVML_ERROR_NOT_SUPPORTED
    assert "nvlink_errors_total" not in Nvml(nvml).read()[0].values


def test_a_slice_of_a_gpu_is_a_device() -> None:
    nvml = FakeNvml(("GPU-0", "GPU-1"))
    nvml.slices = {"GPU-1": ["MIG-a", None, "MIG-b"]}
    readings = {reading.device: reading.values for reading in Nvml(nvml).read()}
    assert list(readings) == ["GPU-0", "GPU-1", "MIG-a", "MIG-b"]
    assert readings["MIG-a"]["memory_total_bytes"] > 0


def test_no_driver_is_one_line() -> None:
    nvml = FakeNvml()
    nvml.failing["nvmlInit"] = 1
    with pytest.raises(ReadingError, match="NVML: Uninitialized"):
        Nvml(nvml).read()
    with pytest.raises(ReadingError, match="NVML"):
        Xids(nvml).wait(0.01)


def test_xids_are_received_until_a_device_is_lost() -> None:
    nvml = FakeNvml()
    xids = Xids(nvml)
    assert xids.wait(0.01) == []
    nvml.events.put((79, "GPU-1"))
    nvml.events.put((48, "GPU-0"))
    assert [*xids.wait(1), *xids.wait(1)] == [Xid(79, "GPU-1"), Xid(48, "GPU-0")]
    nvml.failing["nvmlEventSetWait_v2"] = nvml.NVML_ERROR_GPU_IS_LOST
    with pytest.raises(ReadingError, match="no longer received"):
        xids.wait(0.01)


@pytest.mark.parametrize("refused", ["nvmlEventSetCreate", "nvmlDeviceRegisterEvents"])
def test_a_driver_that_permits_no_events_is_one_error(refused: str) -> None:
    nvml = FakeNvml()
    nvml.failing[refused] = 4  # NVML_ERROR_NO_PERMISSION
    with pytest.raises(ReadingError, match="cannot be received"):
        Xids(nvml).wait(0.01)
    assert all(reading.values["gpu_utilization_ratio"] == 0.97 for reading in Nvml(nvml).read())


@contextmanager
def exporter(page: dict[str, str]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page["text"].encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()


def dcgm_page(**fields: float) -> str:
    return "".join(
        f'# TYPE DCGM_FI_{name} gauge\nDCGM_FI_{name}{{gpu="0",UUID="GPU-0",device="nvidia0",Hostname="n"}} {value}\n'
        for name, value in fields.items()
    )


def test_a_dcgm_exporter_is_read_in_our_units() -> None:
    page = {"text": dcgm_page(DEV_SM_CLOCK=1980, DEV_POWER_USAGE=612.5, DEV_FB_USED=100, DEV_XID_ERRORS=31)}
    with exporter(page) as url:
        dcgm = Dcgm(url)
        ((device, values),) = [(reading.device, reading.values) for reading in dcgm.read()]
        assert (device, values) == (
            "GPU-0",
            {"sm_clock_hertz": 1.98e9, "power_watts": 612.5, "memory_used_bytes": 100 << 20},
        )
        assert dcgm.take_xids() == []  # it may be of last week: the field keeps the last one
        page["text"] = dcgm_page(DEV_XID_ERRORS=79)
        dcgm.read()
        assert dcgm.take_xids() == [Xid(79, "GPU-0")]
        assert dcgm.take_xids() == []
        page["text"] = "<html>no metrics</html>{"
        with pytest.raises(ReadingError, match="dcgm-exporter at"):
            dcgm.read()
    with pytest.raises(ReadingError, match="refused"):
        dcgm.read()


def answers(head: bytes, piece: bytes = b"", *, ends: bool = True) -> Iterator[str]:
    """The address of a server that sends `head`, then `piece` again and again until its caller leaves."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection, suppress(OSError):
                        connection.recv(1 << 16)
                        connection.sendall(head)
                        while not ends:
                            connection.sendall(piece)
                            over.wait(0.01)

        over = threading.Event()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/metrics"
        listening.shutdown(socket.SHUT_RDWR)
    thread.join()


OK = b"HTTP/1.0 200 OK\r\n\r\n"
HOSTILE: dict[str, tuple[bytes, bytes, str]] = {
    "slow headers": (b"HTTP/1.0 200 OK\r\n", b"A", "no complete answer in time"),
    "slow bytes": (OK, b"#", "no complete answer in time"),
    "a redirect": (b"HTTP/1.0 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n", b"", "redirect"),
    "no HTTP": (b"SSH-2.0-OpenSSH\r\n", b"", "not HTTP"),
    "a long line": (
        OK + b'DCGM_FI_DEV_GPU_TEMP{UUID="GPU-0",a="' + b"\\\\" * 7_500_000 + b'"} 1\n', b"", "a line of more than"),
    "too many bytes": (OK + b"# x\n" * (5 << 20), b"", "more than 16,777,216 bytes"),
    "rows without a device": (OK + b'DCGM_FI_DEV_GPU_TEMP{gpu="0"} 40\n' * 150_000, b"", "has no reading"),
    "rows of another exporter": (OK + b'node_cpu{cpu="0"} 40\n' * 150_000, b"", "has no reading"),
    "devices without end": (
        OK + b"".join(b'DCGM_FI_DEV_GPU_TEMP{UUID="%d"} 1\n' % i for i in range(5_000)), b"", "1,000 devices"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_an_exporter_that_never_ends_or_answers_with_anything_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, piece, words = HOSTILE[name]
    if piece:
        monkeypatch.setattr("watch.health.dcgm.LIMIT_S", 0.5)
    with contextmanager(answers)(head, piece, ends=not piece) as url, pytest.raises(ReadingError, match=words) as told:
        Dcgm(url).read()
    assert "\n" not in str(told.value)


def test_a_value_that_is_no_number_costs_itself() -> None:
    with exporter({"text": dcgm_page(DEV_GPU_TEMP=40, DEV_XID_ERRORS=math.nan, DEV_SM_CLOCK=1e308)}) as url:
        dcgm = Dcgm(url)
        assert [reading.values for reading in dcgm.read()] == [{"temperature_celsius": 40}]
        assert dcgm.take_xids() == []


def test_the_counters_that_we_ship_are_those_that_we_read() -> None:
    lines = (ROOT / "grafana" / "dcgm-counters.csv").read_text().splitlines()
    fields = {line.split(",")[0] for line in lines if line and not line.startswith("#")}
    assert fields <= {*FIELDS, "DCGM_FI_DEV_XID_ERRORS"}
    assert {column for name, (column, _) in FIELDS.items() if name in fields} == {
        column for column, _ in FIELDS.values()
    }
    assert {column for column, _ in FIELDS.values()} <= COLUMNS
