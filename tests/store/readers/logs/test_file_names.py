"""The host of a kernel's log: in its name or that of its folder, where this is a host's name."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from store.readers.logs.file_names import host_of_log


@pytest.mark.parametrize(
    "name", ["gpu-07", "node3", "dgx-a100-12", "ip-10-0-3-7", "nid001234", "prod-worker-2", "h100-3"]
)
def test_a_host_names_its_folder(name: str) -> None:
    assert host_of_log(Path(f"evidence/{name}/dmesg.txt")) == name


@pytest.mark.parametrize(
    "name",
    [
        "rankscope-incident-k3x9_a2b",
        "tmpk3x9a2b1",
        "ticket-4711",
        "incident17",
        "crash2",
        "a100-outage",
        "run-3",
        "Downloads",
    ],
)
def test_folders_of_tickets_and_copies_are_no_hosts(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "dmesg.txt").touch()
    assert host_of_log(tmp_path / name / "dmesg.txt") is None


def test_folders_that_differ_in_their_number_are_of_hosts(tmp_path: Path) -> None:
    for name in ("lumi1", "lumi2", "notes3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "dmesg.txt").touch()
    assert host_of_log(tmp_path / "lumi1" / "dmesg.txt") == "lumi1"
    assert host_of_log(tmp_path / "notes3" / "dmesg.txt") is None


def test_a_folder_among_temporary_ones_is_no_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("made1", "made2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "dmesg.txt").touch()
    assert host_of_log(tmp_path / "made1" / "dmesg.txt") is None


def test_the_name_of_a_file_comes_first() -> None:
    assert host_of_log(Path("ticket-4711/dmesg-lumi7.txt")) == "lumi7"


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("dmesg-20260301.log", None),
        ("messages-20260301", None),
        ("syslog.1", None),
        ("dmesg-2026-03-01.txt", None),
        ("dmesg_after.txt", None),
        ("nvidia-smi-q.txt", None),
        ("nvidia-smi-q-gpu-03.txt", "gpu-03"),
        ("dcgmi-diag-gpu-03.json", "gpu-03"),
        ("npu-smi-npu-04.txt", "npu-04"),
        ("rocm-smi.txt", None),
        ("rocm-smi-gpu-04.txt", "gpu-04"),
        ("dmesg-node-a.txt", "node-a"),
        ("kern-dgx01.log.gz", "dgx01"),
    ],
)
def test_dates_numbers_and_options_in_a_files_name_are_no_hosts(name: str, host: str | None) -> None:
    assert host_of_log(Path("evidence") / name) == host
