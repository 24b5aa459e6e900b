"""GPU readings from the `/metrics` of a running dcgm-exporter.

    Dcgm("http://127.0.0.1:9400/metrics").read()

For nodes without NVML (a container without the driver's library), and for nodes where only DCGM may query the GPUs.
`grafana/dcgm-counters.csv` enables fields that dcgm-exporter's default list lacks.
"""

from __future__ import annotations

import http.client
import math
import re
import urllib.parse
from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families

from probes.tape.redaction.secrets import Redactor
from store.readers.untrusted.http_deadline import HttpDeadline, plain_reason
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
LIMIT_S = 5.0
"""Time limit of the whole request, in seconds."""
MAX_BYTES = 16 << 20
MAX_LINE_CHARS = 8 << 10
"""Maximum characters of one line; a few hundred are usual. The parser's time grows superlinearly with line length."""
MAX_DEVICES = 1_000
_SAMPLE = re.compile(rf"(?:{'|'.join([*FIELDS, _XID])})[{{ \t]")


class Dcgm:
    """All GPUs of the exporter at `url`. DCGM's XID field holds the last error, so each change of the field is a new
    error."""

    name = "DCGM"

    def __init__(self, url: str) -> None:
        self.url = url
        self._last_xid: dict[str, int] = {}
        self._xids: list[Xid] = []

    def read(self) -> Sequence[Reading]:
        """One reading per device. Raises ReadingError."""
        try:
            with HttpDeadline(LIMIT_S) as opener, opener.open(self.url, timeout=LIMIT_S) as answer:
                body = answer.read(MAX_BYTES + 1)
            found = self._values(body)
        except (OSError, ValueError, http.client.HTTPException) as error:
            shown = urllib.parse.urlsplit(self.url)._replace(query="", fragment="").geturl()
            raise ReadingError(f"dcgm-exporter at {Redactor()(shown)}: {plain_reason(error)}") from None
        return [Reading(uuid, values) for uuid, values in sorted(found.items())]

    def _values(self, body: bytes) -> dict[str, dict[str, float]]:
        """Parse {device: {column: value}}. Raises ValueError if there is no device, or more than any node has."""
        if len(body) > MAX_BYTES:
            raise ValueError(f"the answer has more than {MAX_BYTES:,} bytes")
        lines = body.decode("utf-8", "replace").splitlines()
        if any(len(line) > MAX_LINE_CHARS for line in lines):
            raise ValueError(f"the answer has a line of more than {MAX_LINE_CHARS:,} characters")
        found: dict[str, dict[str, float]] = {}
        for line in (line for line in lines if _SAMPLE.match(line)):
            for sample in (sample for family in text_string_to_metric_families(line) for sample in family.samples):
                self._take(sample.name, sample.labels.get("UUID", ""), sample.value, found)
            if len(found) > MAX_DEVICES:
                raise ValueError(f"the answer names more than {MAX_DEVICES:,} devices: no node has so many")
        if not found:
            raise ValueError("the answer has no reading of a GPU (label UUID, fields of grafana/dcgm-counters.csv)")
        return found

    def _take(self, name: str, uuid: str, value: float, found: dict[str, dict[str, float]]) -> None:
        if not uuid:
            return
        values = found.setdefault(uuid, {})
        column, factor = FIELDS.get(name, ("", 1))
        if not math.isfinite(value * factor):
            return  # not measured: some exporters print DCGM's blank value as NaN
        if name == _XID:
            self._note_xid(uuid, int(value))
        else:
            values[column] = value * factor

    def take_xids(self) -> list[Xid]:
        """Return the XID errors since the last call."""
        taken, self._xids = self._xids, []
        return taken

    def _note_xid(self, uuid: str, code: int) -> None:
        before = self._last_xid.get(uuid)
        self._last_xid[uuid] = code
        if before is not None and code not in (0, before):
            self._xids.append(Xid(code, uuid))
