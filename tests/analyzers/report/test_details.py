"""Details of events and calls on the HTML page: units and words, no dictionaries of Python."""

from __future__ import annotations

from analyzers.report.html.diagnosis_page import _detail


def test_a_detail_has_units_and_no_brackets() -> None:
    text = _detail(
        {"kind": "x", "stall_ns": 5_100_000, "bytes": 8 << 20, "killed_rank": 3, "ranks": [0, 1, 2, 3, 6],
         "loss_level": float("nan"),
         "versions": {"torch": "2.13", "kernel": "6.1"}, "moments": [{"step": 3, "loss": 2.123456789}], "lr": 0.0003}
    )  # fmt: skip
    assert text == (
        "stall 5.1 ms, size 8 MiB, killed rank 3, ranks 0-3 and 6, versions torch 2.13, kernel 6.1, "
        "moments step 3, loss 2.123, learning rate 0.0003"
    )
