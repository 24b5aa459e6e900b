"""Waits and bandwidth of collectives: groups in their natural order, axes that can be read."""

from __future__ import annotations

import numpy as np
import pytest

from analyzers.figures.time import collectives

GROUPS = ("tp:104-111", "tp:16-23", "tp:8-15")


def calls(sizes: tuple[int, ...], gb_per_s: tuple[float, ...]) -> dict[str, object]:
    return {
        "op": np.array(["all_reduce"] * len(sizes)), "process_group": np.array(GROUPS[: len(sizes)]),
        "bytes": np.array(sizes), "num_calls": np.ones(len(sizes)), "transfer_ms": np.ones(len(sizes)),
        "bus_gb_per_s": np.array(gb_per_s), "wait_s": np.full(len(sizes), 2.0),
    }  # fmt: skip


def test_groups_that_waited_equally_stand_in_their_order() -> None:
    figure = collectives.waits(calls((1, 1, 1), (1.0, 1.0, 1.0)))
    assert [name.rpartition(" ")[2] for name in figure.data[0].y] == [*reversed(GROUPS)]


@pytest.mark.parametrize("sizes", [(67_108_864,) * 3, (67_108_864, 134_217_728, 134_217_728), (8, 4_096, 1 << 30)])
def test_the_axes_have_ticks_and_room_for_every_dot(sizes: tuple[int, ...]) -> None:
    figure = collectives.draw(calls(sizes, (130.5, 130.5, 90.0)))
    for axis, values in ((figure.layout.xaxis, sizes), (figure.layout.yaxis, (130.5e9, 90e9))):
        low, high = axis.range
        assert low < np.log10(min(values)) <= np.log10(max(values)) < high
        assert len(axis.tickvals) >= 1
        assert len(axis.tickvals) <= 12
    assert "100 G" in figure.layout.yaxis.ticktext
