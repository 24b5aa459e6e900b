"""GPU readings from the `/metrics` of a running dcgm-exporter.

    Dcgm("http://127.0.0.1:9400/metrics").read()

For nodes without NVML (a container without the driver's library) and those where only DCGM may query the GPUs.
`grafana/dcgm-counters.csv` enables the fields that its default list lacks.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families

from watch.health.device import Reading, ReadingError, Xid

__all__ = ["FIELDS", "Dcgm"]

FIELDS: dict[str, tuple[str, float]] = {
    "DCGM_FI_DEV_GPU_UTIL": ("gpu_utilization_ratio", 0.01),
    "DCGM_FI_DEV_GPU_TEMP": ("temperature_celsius", 1),
    "DCGM_FI_DEV_POWER_USAGE": ("power_watts", 1),
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": ("energy_joules", 1e-3),
    "DCGM_FI_DEV_SM_CLOCK": ("sm_clock_hertz", 1e6),
    "DCGM_FI_DEV_FB_USED": ("memory_used_bytes", 1 << 20),
    "DCGM_FI_DEV_FB_TOTAL": ("memory_total_bytes", 1 << 20),
    "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": ("throttle_reasons", 1),
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": ("throttle_reasons", 1),
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": ("ecc_corrected_total", 1),
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": ("ecc_uncorrected_total", 1),
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": ("remapped_rows_total", 1),
    "DCGM_FI_DEV_ROW_REMAP_PENDING": ("remap_pending", 1),
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": ("remap_failed", 1),
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": ("pcie_replay_total", 1),
    "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": ("nvlink_errors_total", 1),
    "DCGM_FI_PROF_SM_ACTIVE": ("sm_active_ratio", 1),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": ("tensor_active_ratio", 1),
    "DCGM_FI_PROF_DRAM_ACTIVE": ("memory_bandwidth_ratio", 1),
}
"""{DCGM's field: (column of table `health`, factor to its unit)}."""
_XID = "DCGM_FI_DEV_XID_ERRORS"
TIMEOUT_S = 5.0
MAX_BYTES = 16 << 20


class Dcgm:
    """All GPUs of the exporter at `url`. Its XID field holds the last error: a change of it is a new one."""

    name = "DCGM"

    def __init__(self, url: str) -> None:
        self.url = url
        self._last_xid: dict[str, int] = {}
        self._xids: list[Xid] = []

    def read(self) -> Sequence[Reading]:
        """One reading a device. Raises ReadingError."""
        try:
            with urllib.request.urlopen(self.url, timeout=TIMEOUT_S) as answer:
                text = answer.read(MAX_BYTES).decode("utf-8", "replace")
            families = list(text_string_to_metric_families(text))
        except (OSError, ValueError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise ReadingError(f"dcgm-exporter at {self.url}: {reason}") from None
        found: dict[str, dict[str, float]] = {}
        for sample in (sample for family in families for sample in family.samples):
            uuid = sample.labels.get("UUID", "")
            if not uuid:
                continue
            values = found.setdefault(uuid, {})
            if sample.name == _XID:
                self._note(uuid, int(sample.value))
            elif sample.name in FIELDS and sample.value == sample.value:
                column, factor = FIELDS[sample.name]
                values[column] = sample.value * factor
        return [Reading(uuid, values) for uuid, values in sorted(found.items())]

    def take_xids(self) -> list[Xid]:
        """XID errors since the last call."""
        taken, self._xids = self._xids, []
        return taken

    def _note(self, uuid: str, code: int) -> None:
        before = self._last_xid.get(uuid)
        self._last_xid[uuid] = code
        if before is not None and code not in (0, before):
            self._xids.append(Xid(code, uuid))
