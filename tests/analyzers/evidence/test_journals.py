"""A systemd journal in the forms that journalctl writes for other programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from store.readers.programs.journald import lines, recognise
from tests.analyzers.evidence.written import diagnosed

XID = "NVRM: Xid (PCI:0000:4e:00): 79, pid=4242, name=python, GPU has fallen off the bus."
ENTRIES = [
    {"__CURSOR": f"s={n}", "__REALTIME_TIMESTAMP": str(1790000000123456 + n), "_HOSTNAME": "gpu-03", "PRIORITY": "3",
     "SYSLOG_IDENTIFIER": "kernel", "MESSAGE": text} for n, text in enumerate(("nvidia 0000:4e:00.0: enabling", XID))
]  # fmt: skip
FORMS = {
    "json": "".join(json.dumps(entry) + "\n" for entry in ENTRIES),
    "json-pretty": "".join(json.dumps(entry, indent="\t") + "\n" for entry in ENTRIES),
    "export": "".join("".join(f"{name}={value}\n" for name, value in entry.items()) + "\n" for entry in ENTRIES),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_has_the_same_lines(tmp_path: Path, form: str) -> None:
    path = tmp_path / "journal"
    path.write_text(FORMS[form])
    assert recognise(path.read_bytes())
    assert list(lines(path))[1] == f"2026-09-21T14:13:20.123457+00:00 gpu-03 kernel: {XID}"
    (found,) = diagnosed(tmp_path, "journal", FORMS[form]).fired
    assert "GPU 0000:4e:00 of gpu-03 lost its GPU" in found.summary


def test_a_cut_journal_is_read_up_to_the_cut(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text(FORMS["json-pretty"][:-40])
    assert len(list(lines(path))) == 1
