"""Format numbers with their unit.

duration(0.0153)       # "15.3 ms"
amount(48_200)         # "48.2 k"
data_size(3 << 20)     # "3 MiB"
"""

from __future__ import annotations

import math

from analyzers.wording import size_text

__all__ = ["age", "amount", "data_size", "duration", "percent"]

_NONE = "–"


def duration(seconds: float | None) -> str:
    """Format seconds in a suitable unit."""
    if seconds is None or not math.isfinite(seconds):
        return _NONE
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    if abs(seconds) < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if abs(seconds) < 100 else age(round(seconds))


def age(seconds: float | None) -> str:
    """Format an age in whole seconds, minutes, hours or days."""
    if seconds is None or not math.isfinite(seconds):
        return _NONE
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 172_800:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} days"


def amount(number: float | None) -> str:
    """Format a count, with a decimal prefix from ten thousand upwards."""
    if number is None or not math.isfinite(number):
        return _NONE
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= factor:
            scaled = number / (1e3 if prefix == "k" else factor)
            return f"{scaled:.3g} {prefix}" if scaled < 1000 else f"{scaled:,.0f} {prefix}"
    return f"{number:,.0f}" if float(number).is_integer() or abs(number) >= 1000 else f"{number:.3g}"


def data_size(num_bytes: float | None) -> str:
    """Format bytes with a binary prefix."""
    return _NONE if num_bytes is None or not math.isfinite(num_bytes) else size_text(num_bytes)


def percent(ratio: float | None) -> str:
    """Format a ratio as a percentage."""
    return _NONE if ratio is None or not math.isfinite(ratio) else f"{100 * ratio:.3g} %"
