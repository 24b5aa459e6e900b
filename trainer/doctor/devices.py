"""The GPUs of this machine as the driver sees them, and a dcgm-exporter if one runs.

for check in device_checks("http://127.0.0.1:9400/metrics"): ...
"""

from __future__ import annotations

import threading

from trainer.doctor.check import Check
from watch.health import nvml
from watch.health.dcgm import Dcgm
from watch.health.device import ReadingError

__all__ = ["DCGM_URL", "device_checks"]

DCGM_URL = "http://127.0.0.1:9400/metrics"
"""Default address of a dcgm-exporter."""
DRIVER_S = 10.0
"""Seconds to wait for the driver: a device that has fallen off the bus may never answer."""


def device_checks(dcgm_url: str = DCGM_URL) -> list[Check]:
    """Check the driver, the GPUs and the exporter. Without a driver, the note on a missing exporter has no remedy."""
    driver = nvml.has_driver()
    return [_driver(driver), _dcgm(dcgm_url, expected=driver)]


def _driver(is_there: bool) -> Check:
    if not is_there:
        return Check(name="gpu driver", status="note", found="no NVIDIA driver; only the host's health is sampled")
    answers: list[Check] = []
    asking = threading.Thread(target=lambda: answers.append(_ask_driver()), daemon=True)
    asking.start()
    asking.join(DRIVER_S)
    if answers:
        return answers[0]
    remedy = "check dmesg for XID errors; a device that fell off the bus needs a reset"
    return Check(name="gpu driver", status="failed", found=f"no answer in {DRIVER_S:.0f} s", remedy=remedy)


def _ask_driver() -> Check:
    remedy = "check nvidia-smi; in a container, start it with --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    try:
        import pynvml

        readings = nvml.Nvml(pynvml).read()
        version = pynvml.nvmlSystemGetDriverVersion()
    except (ImportError, ReadingError) as error:
        return Check(name="gpu driver", status="failed", found=str(error), remedy=remedy)
    fields = {field for reading in readings for field in reading.values}
    found = f"{version}, {len(readings)} GPU{'s' * (len(readings) != 1)}, {len(fields)} readings each"
    return Check(
        name="gpu driver", status="ok" if readings else "failed", found=found, remedy="" if readings else remedy
    )


def _dcgm(url: str, *, expected: bool) -> Check:
    try:
        readings = Dcgm(url).read()
    except ReadingError:
        remedy = (
            "optional: start dcgm-exporter -f grafana/dcgm-counters.csv and set probes.dcgm_url" if expected else ""
        )
        return Check(name="dcgm-exporter", status="note", found=f"no answer at {url}", remedy=remedy)
    return Check(name="dcgm-exporter", status="ok", found=f"{len(readings)} GPUs at {url}")
