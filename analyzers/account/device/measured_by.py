"""Tell what measured the steps of an attempt: stamps or calls on its devices, or only its hosts.

is_stamped(source, attempt=0), has_device_calls(source, attempt=0), has_host_gaps(source, attempt=0)
"""

from __future__ import annotations

from analyzers.source import Source, lacking, missing_tables

__all__ = ["has_device_calls", "has_host_gaps", "has_uncompared_gaps", "is_on_device", "is_stamped"]


def is_stamped(source: Source, attempt: int) -> bool:
    """Return True if steps of the attempt were stamped on their devices."""
    if lacking(source, steps=("stamped_steps",)):
        return False
    return bool(source.rows("SELECT 1 FROM steps WHERE attempt = ? AND stamped_steps > 0 LIMIT 1", [attempt]))


def has_device_calls(source: Source, attempt: int) -> bool:
    """Return True if the attempt has calls timed on devices and no waits measured by stamps or hosts."""
    if missing_tables(source, "nccl_groups", "collectives") or is_stamped(source, attempt):
        return False
    timed = "SELECT 1 FROM collectives WHERE attempt = ? AND wait_ns IS {} AND end_ns IS NOT NULL AND step IS NOT NULL"
    has = [bool(source.rows(f"{timed.format(null)} LIMIT 1", [attempt])) for null in ("NULL", "NOT NULL")]
    return has == [True, False]


def has_host_gaps(source: Source, attempt: int) -> bool:
    """Return True if gaps were measured and are the rank's own work.

    On a GPU without stamps the host may wait for its device, and thus for other ranks, in any gap that reads a value
    back: such gaps hold no own work to compare.
    """
    return _has_gaps(source, attempt) and (is_stamped(source, attempt) or not is_on_device(source, attempt))


def has_uncompared_gaps(source: Source, attempt: int) -> bool:
    """Return True if gaps were measured only on the host of a GPU, and no call was timed on the device."""
    on_host = _has_gaps(source, attempt) and is_on_device(source, attempt)
    return on_host and not is_stamped(source, attempt) and not has_device_calls(source, attempt)


def _has_gaps(source: Source, attempt: int) -> bool:
    sql = "SELECT 1 FROM steps WHERE attempt = ? AND before_forward_ns IS NOT NULL LIMIT 1"
    return bool(source.rows(sql, [attempt]))


def is_on_device(source: Source, attempt: int) -> bool:
    """Return True if ranks of the attempt compute on devices."""
    sql = "SELECT 1 FROM ranks WHERE attempt = ? AND device IS NOT NULL AND device <> 'cpu' LIMIT 1"
    return source.has("ranks") and bool(source.rows(sql, [attempt]))
