"""The chart of one health reading: its unit, the names of its lines, and the band of many devices."""

from __future__ import annotations

import numpy as np

from dashboard.data.sql.health_queries import Line, Trend
from dashboard.views.health import _reading

AT = np.array([0.0, 1.0, 2.0])


def line(device: str, *values: float) -> Line:
    return Line(node="n0", device=device, at=AT, values=np.array(values))


def test_a_ratio_is_drawn_in_percent_with_a_line_a_device() -> None:
    trend = Trend(lines=[line("host", 0.1, 0.2, 0.3), line("GPU-0123456789ab", 0.5, 0.5, 0.5)], num_devices=2)
    figure = _reading(trend, "gpu_utilization_ratio")
    assert [trace.name for trace in figure.data] == ["n0", "n0 GPU-01234567"]
    np.testing.assert_allclose(figure.data[0].y, [10, 20, 30])


def test_of_many_devices_the_band_encloses_all_and_the_median_is_a_line() -> None:
    bounds = {
        "seconds": AT, "low": np.array([1.0, 2.0, 3.0]), "middle": np.array([4.0, 5.0, 6.0]),
        "high": np.array([7.0, 8.0, 9.0]),
    }  # fmt: skip
    figure = _reading(Trend(lines=[line("GPU-1", 7, 8, 9)], num_devices=40, all_devices=bounds), "temperature_celsius")
    by_name = {trace.name: trace for trace in figure.data}
    assert set(by_name) == {"n0 GPU-1", "median of all", "range of all"}
    np.testing.assert_allclose(by_name["median of all"].y, [4, 5, 6])
    band = by_name["range of all"]
    np.testing.assert_allclose(band.x, [0, 1, 2, 2, 1, 0])
    np.testing.assert_allclose(band.y, [7, 8, 9, 3, 2, 1])
