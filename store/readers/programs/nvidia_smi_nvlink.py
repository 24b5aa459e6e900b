"""Read `nvidia-smi nvlink -s`: GPUs with fewer active NVLinks than others of the same model on the host."""

from __future__ import annotations

import re
from pathlib import Path

from store.readers.logs.file_names import host_of_log
from store.readers.programs.gpu_readings import unhealthy
from store.readers.programs.rows import ProgramRows
from store.readers.programs.text import read_text
from store.readers.untrusted.external_files import DOCUMENT_BYTES

NAME = "nvidia-smi nvlink -s"
_GPU = re.compile(r"^GPU (\d{1,3}): (.{1,100}?) \(UUID: [\w-]+\)\s*$")
_LINK = re.compile(r"^\s+Link (\d{1,3}): (\S.*)$")
_ADVICE = "Reset the GPU, restart the host's fabric manager, and look for XID 74 in its kernel log."


def recognise(first: bytes) -> bool:
    """Return True for the links of a GPU in the first lines."""
    lines = first[:2000].decode("utf-8", "replace").splitlines()[:4]
    return any(map(_GPU.match, lines)) and any(map(_LINK.match, lines))


def read(path: Path) -> ProgramRows:
    """Compare the GPUs of each model. If all of them lack the same number of links, the host was built without these
    links."""
    found, host = ProgramRows(), host_of_log(path)
    gpus: list[tuple[int, str, str, list[str]]] = []
    """Line, number, model and inactive links of each GPU."""
    for number, line in enumerate(read_text(path, DOCUMENT_BYTES).splitlines(), 1):
        if gpu := _GPU.match(line):
            gpus.append((number, gpu[1], gpu[2], []))
        elif gpus and (link := _LINK.match(line)) and "inactive" in link[2]:
            gpus[-1][3].append(link[1])
    for number, gpu_number, model, inactive in gpus:
        usual = min(len(links) for _, _, name, links in gpus if name == model)
        if len(inactive) > usual:
            are = "are" if len(inactive) > 1 else "is"
            what = f"{len(inactive)} NVLink{'s' * (len(inactive) > 1)} of GPU {gpu_number}{{of}} "
            what += f"({', '.join(inactive)}) {are} inactive, against {usual} on other GPUs"
            found.log_events.append(unhealthy(gpu_number, what, _ADVICE, number, host))
    return found
