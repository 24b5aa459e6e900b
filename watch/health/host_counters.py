"""Counters of a host's network, InfiniBand ports, pressure and cgroup, from files below /proc and /sys.

    host_counters(Path("/"))["infiniband_downs_total"]

Counters that the host lacks are left out. EFA adapters are counted with InfiniBand. On these adapters, failed reads and
writes and unresponsive peers count as errors; timeouts that change the path and throttled connections count as
congestion.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["host_counters"]

_ERRORS = (
    "counters/symbol_error", "counters/port_rcv_errors", "counters/local_link_integrity_errors",
    "counters/excessive_buffer_overrun_errors", "counters/port_xmit_discards", "hw_counters/local_ack_timeout_err",
    "hw_counters/packet_seq_err", "hw_counters/out_of_sequence", "hw_counters/rnr_nak_retry_err",
    "hw_counters/rdma_read_wr_err", "hw_counters/rdma_write_wr_err", "hw_counters/unresponsive_remote_events",
)  # fmt: skip
_DOWNS = ("counters/link_downed", "counters/link_error_recovery")
_CONGESTION = (
    "hw_counters/rp_cnp_handled", "hw_counters/retrans_timeout_events", "hw_counters/impaired_remote_conn_events",
)  # fmt: skip
_US_PER_S = 1e6


def host_counters(root: Path) -> dict[str, float]:
    """Values of columns of `health`."""
    return dict([*_tcp(root), *_pressure(root), *_cgroup(root), *_infiniband(root)])


def _tcp(root: Path) -> Iterator[tuple[str, float]]:
    lines = [line.split() for line in _text(root / "proc/net/snmp").splitlines() if line.startswith("Tcp:")]
    if len(lines) == 2:
        values = dict(zip(*lines, strict=False))
        for name, column in (("OutSegs", "tcp_segments_total"), ("RetransSegs", "tcp_retransmits_total")):
            if values.get(name, "").isdecimal():
                yield column, int(values[name])


def _pressure(root: Path) -> Iterator[tuple[str, float]]:
    """Pressure stall information, from lines in percent: `some avg10=1.50 avg60=0.40 avg300=0.10 total=123456`."""
    for name in ("cpu", "memory", "io"):
        fields = _text(root / "proc/pressure" / name).partition("\n")[0].split()
        shares = [field.removeprefix("avg10=") for field in fields if field.startswith("avg10=")]
        if fields[:1] == ["some"] and shares:
            try:
                yield f"{name}_pressure_ratio", float(shares[0]) / 100
            except ValueError:
                continue


def _cgroup(root: Path) -> Iterator[tuple[str, float]]:
    """CPU throttling of the cgroup. Empty if the cgroup has no limit: its count is then 0 even if nested groups are
    throttled.
    """
    lines = (line.split() for line in _text(root / "sys/fs/cgroup/cpu.stat").splitlines())
    counts = {words[0]: words[1] for words in lines if len(words) == 2}
    stopped_us = counts.get("throttled_usec", "")
    if stopped_us.isdecimal() and counts.get("nr_periods") != "0":
        yield "cgroup_throttled_seconds_total", int(stopped_us) / _US_PER_S


def _infiniband(root: Path) -> Iterator[tuple[str, float]]:
    """Sums of the error counters over all ports."""
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    for column, files in (
        ("infiniband_errors_total", _ERRORS),
        ("infiniband_downs_total", _DOWNS),
        ("infiniband_congestion_total", _CONGESTION),
    ):
        texts = [_text(port / file).strip() for port in ports for file in files]
        counts = [int(text) for text in texts if text.isdecimal()]
        if counts:
            yield column, sum(counts)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
