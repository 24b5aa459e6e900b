"""The page of health on readings as `watch` writes them: what is drawn, and what is said of a device in trouble."""

from __future__ import annotations

from pathlib import Path

from tests.analyzers.health.test_health import Node
from tests.dashboard.opened import charts, open_page, shown

FLOWN = {"throttle_reasons": 0x20, "temperature_celsius": 96.0, "ecc_uncorrected_total": 2, "remap_pending": 1}


def test_readings_are_drawn_and_a_sound_node_has_no_problems(tmp_path: Path) -> None:
    node = Node(tmp_path).minute(gpu={"sm_active_ratio": 0.5, "tensor_active_ratio": 0.4})
    node.findings()
    app = open_page(node.run.path.parent, "health")
    assert not app.exception
    headings = {element.value for element in app.subheader}
    assert {"GPU", "Temperature", "SM clock", "Host load (1 min)", "SM active", "Tensor cores active"} <= headings
    assert not {"XID errors", "Throttling, errors, remapped rows"} & headings  # the power cap is ordinary
    assert len(charts(app)) == len(headings)
    assert "Unchanged on all devices during the run: Memory errors, corrected" in shown(app)


def test_throttling_errors_remaps_and_xids_are_told(tmp_path: Path) -> None:
    node = Node(tmp_path).minute(gpu=FLOWN, host={"network_errors_total": 9, "swapped_pages_total": 4})
    node.read("host", 70, swapped_pages_total=40)
    node.xid(79)
    node.findings()
    app = open_page(node.run.path.parent, "health")
    assert not app.exception
    assert {"XID errors", "Throttling, errors, remapped rows", "Pages swapped"} <= {e.value for e in app.subheader}
    faults, problems = app.dataframe[0].value, app.dataframe[1].value
    assert (faults["XID"].tolist(), faults["device"].tolist(), faults["class"].tolist()) == ([79], ["GPU-1"], ["bus"])
    worst = problems.iloc[0]
    assert worst["device"] == "GPU-1"
    assert "heat (driver) (50 % of the time)" in worst["throttled by"]
    assert worst["remapping"] == "pending until the next reset"
    assert worst["during the run"] == "memory errors, uncorrected 2"


def test_counters_that_were_not_read_do_not_look_healthy(tmp_path: Path) -> None:
    """Beside a device that throttled: an empty cell would say that it had no error."""
    node = Node(tmp_path)
    for second in range(5):
        node.read("GPU-1", second, throttle_reasons=64, temperature_celsius=90.0)
    node.findings()
    (row,) = open_page(node.run.path.parent, "health").dataframe[0].value.to_dict("records")
    assert row["device"] == "GPU-1"
    assert {row[name] for name in ("remapping", "during the run", "before the run")} == {"not read"}


def test_of_many_devices_it_is_said_which_are_drawn(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for device in range(40):
        for second in range(5):
            node.read(f"GPU-{device:02}", second, temperature_celsius=60.0 + device)
            node.read("host", second, node=f"node-{device}", load_1m=1.0 + device)
    node.findings()
    app = open_page(node.run.path.parent, "health")
    assert not app.exception
    assert "Lines: the 3 lowest and highest of 40 hosts. Band: all hosts." in shown(app)
    assert "Lines: the 3 lowest and highest of 40 devices. Band: all devices." in shown(app)


def test_a_run_without_health_says_where_it_comes_from(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.findings()
    assert "No health was recorded in this run." in shown(open_page(node.run.path.parent, "health"))
