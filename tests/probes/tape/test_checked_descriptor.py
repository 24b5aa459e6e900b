"""A script that closes all descriptors gets its own files only, and the records go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from probes.tape.events import read_events
from probes.tape.format.names import read_names

SCRIPT = """
import os, sys
from pathlib import Path
from probes.tape.events import EventWriter
from probes.tape.format.names import NameWriter

folder = Path(sys.argv[1])
events = EventWriter(folder / "events.jsonl", attempt=0, rank=0)
names = NameWriter(folder / "names.jsonl")
events.write("saved", folder="before")
names("before")
os.closerange(3, int(sys.argv[2]))
own = [open(folder / f"own-{number}", "w") for number in range(600)]  # gets all their numbers
events.write("saved", folder="after")
names("after")
events.close()
names.close()
for number, file in enumerate(own):
    print(number, file=file, flush=True)
"""


def _run(folder: Path, until: int) -> None:
    folder.mkdir()
    subprocess.run([sys.executable, "-c", SCRIPT, str(folder), str(until)], check=True, timeout=100)
    assert [event["folder"] for event in read_events(folder / "events.jsonl")[0]] == ["before", "after"]
    assert {"before", "after"} <= set(read_names(folder / "names.jsonl")[0].values())
    for number in range(600):
        assert json.loads((folder / f"own-{number}").read_text()) == number, "its file holds what it wrote"


def test_records_go_on_and_no_file_of_the_script_gets_them(tmp_path: Path) -> None:
    assert os.sysconf("SC_OPEN_MAX") >= 1024
    _run(tmp_path / "some", 256)
    _run(tmp_path / "all", 1024)
