"""List the runs published at an address.

runs_at("s3://lake/rankscope")             # ["demo-20261122-101500", ...], newest first; empty if the address is a run
run_address("s3://lake/rankscope?region=eu-west-1", "demo-20261122-101500")
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from store.published.address import AddressError, one_line, open_address
from store.runs_folder import MAX_RUNS

__all__ = ["RUN_NAME", "newest_run", "run_address", "runs_at"]

REQUESTS = 16
RUN_NAME = re.compile(r"(?!\.)[\w.+ -]{1,200}\Z")
"""Valid names of run folders; the content at an address is untrusted."""


def runs_at(address: str) -> list[str]:
    """Names of the runs directly at an address, newest first. Raises AddressError."""
    files, root = open_address(address)
    from pyarrow import fs

    try:
        found = files.get_file_info(fs.FileSelector(root, allow_not_found=True))
        names = [
            info.base_name for info in found if info.type == fs.FileType.Directory and RUN_NAME.match(info.base_name)
        ]
        if any(info.base_name == "run.json" for info in found):
            return []

        def manifest_info(name: str) -> Any:
            return files.get_file_info(f"{root}/{name}/run.json")

        with ThreadPoolExecutor(REQUESTS) as pool:
            manifests = list(zip(names, pool.map(manifest_info, names), strict=True))
    except OSError as error:
        raise AddressError(f"{address}: {one_line(error)}") from None
    runs = [(info.mtime_ns or 0, name) for name, info in manifests if info.type == fs.FileType.File]
    return [name for _, name in sorted(runs, reverse=True)[:MAX_RUNS]]


def run_address(address: str, name: str) -> str:
    """Address of a run that `runs_at` listed."""
    place, mark, options = address.partition("?")
    return f"{place.rstrip('/')}/{name}{mark}{options}"


def newest_run(address: str) -> tuple[str, list[str]]:
    """Return (address of the newest run, names of all runs), or (`address`, no names) if it is a run itself. Raises
    AddressError.
    """
    names = runs_at(address)
    return (run_address(address, names[0]) if names else address), names
