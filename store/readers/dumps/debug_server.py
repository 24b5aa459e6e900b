"""Fetch flight-recorder dumps of a running or hanging job from torch's debug server (torch 2.10 and later).

    fetched = fetch_dumps("http://head-node:25999", Path("dumps"))
    fetched.ranks, fetched.silent          # ranks with a dump, and {rank: why it has none}

`torch.distributed.debug.start_debug_server()` in the script serves one page for the whole job on rank 0. It queries the
server thread of every rank, which answers even if the rank is stuck in a call, and shows the answers as JSON inside
HTML. Only that page is requested, never an address that it contains.
"""

from __future__ import annotations

import html
import json
import os
import re
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request

from store.readers.untrusted.external_files import modified_ns, read_whole
from store.readers.untrusted.http_deadline import HttpDeadline, plain_reason

__all__ = ["DebugServerError", "Fetched", "dumps_of_page", "fetch_dumps", "is_page"]

PAGES = ("fr_trace_nccl_json", "fr_trace_json")
"""Pages of NCCL's recorder, and of the recorder for all other backends."""
MAX_PAGE_BYTES = 512 * 2**20
_RANK = re.compile(r"<h2>Rank (\d{1,9}): [^<]*</h2>(.*?)(?=<h2>Rank \d+: |</section>|\Z)", re.DOTALL)
_TEXT = re.compile(r"<pre>(.*)</pre>", re.DOTALL)


def is_page(first: bytes) -> bool:
    """Return True for a page of the debug server saved from a browser: JSON of all ranks inside HTML."""
    return b"<h2>Rank " in first and (b"fr_trace" in first or b"nccl_trace" in first) and b"<pre>{" in first


def dumps_of_page(path: Path, into: Path) -> dict[str, str]:
    """Write one dump per rank of a saved page; returns why ranks have none. Raises SourceError, OSError."""
    missing: dict[str, str] = {}
    for rank, found in _ranks(read_whole(path, MAX_PAGE_BYTES)[0].decode("utf-8", "replace")).items():
        if isinstance(found, str):
            missing[f"rank {rank} of {path.name}"] = f"has no dump: {found}"
            continue
        file = into / f"rank_{rank}.json"
        file.write_text(json.dumps(found), encoding="utf-8")
        os.utime(file, ns=(modified_ns(path), modified_ns(path)))  # time of the dump
    return missing


class DebugServerError(Exception):
    """Nothing could be fetched; the message is one line for the user."""


@dataclass(slots=True)
class Fetched:
    """Result of `fetch_dumps`: files `rank_N.json` were written for `ranks`."""

    ranks: list[int] = field(default_factory=list)
    silent: dict[int, str] = field(default_factory=dict)


def fetch_dumps(address: str, folder: Path, *, timeout_s: float = 90.0) -> Fetched:
    """Ask the server at `address` (http://HOST:PORT) and write one dump per rank. Raises DebugServerError, OSError."""
    parts = urlsplit(address if "//" in address else f"http://{address}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise DebugServerError(f"{address}: must be the debug server's address, like http://head-node:25999")
    dumps: dict[int, dict[str, object]] = {}
    fetched = Fetched()
    problems = []
    for page in PAGES:
        try:
            text = _get(f"{parts.scheme}://{parts.netloc}/{page}", timeout_s)
        except DebugServerError as error:
            problems.append(str(error))
            continue
        for rank, found in _ranks(text).items():
            if isinstance(found, str):
                fetched.silent[rank] = found
            elif found.get("entries") or rank not in dumps:
                dumps[rank] = found
    if not dumps:
        why = (
            problems[0]
            if len(problems) == len(PAGES)
            else next(iter(fetched.silent.values()), "its page lists no rank")
        )
        raise DebugServerError(f"{address}: {why}")
    folder.mkdir(parents=True, exist_ok=True)
    for rank, dump in sorted(dumps.items()):
        _write_new(folder / f"rank_{rank}.json", json.dumps(dump))
        fetched.ranks.append(rank)
        fetched.silent.pop(rank, None)
    return fetched


def _get(url: str, timeout_s: float) -> str:
    try:
        with HttpDeadline(timeout_s) as opener, opener.open(Request(url), timeout=timeout_s) as answer:
            body: bytes = answer.read(MAX_PAGE_BYTES + 1)
    except HTTPError as error:
        raise DebugServerError(
            f"/{url.rpartition('/')[2]} answered {error.code}: is it torch's debug server?"
        ) from None
    except (URLError, OSError, ValueError, HTTPException) as error:
        raise DebugServerError(f"no answer ({' '.join(plain_reason(error).split())[:120]})") from None
    if len(body) > MAX_PAGE_BYTES:
        raise DebugServerError(f"its page is larger than {MAX_PAGE_BYTES // 2**20} MiB: let the ranks write dumps")
    return body.decode("utf-8", "replace")


def _write_new(path: Path, text: str) -> None:
    """Write a file atomically; an existing link is replaced, not followed."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(text)
    fresh.replace(path)


def _ranks(page: str) -> dict[int, dict[str, object] | str]:
    """Return the dump of each rank on a page, or the reason why there is none."""
    found: dict[int, dict[str, object] | str] = {}
    for rank, part in _RANK.findall(page):
        match = _TEXT.search(part)
        text = html.unescape(match[1]).strip() if match else ""
        try:
            # torch does not escape the JSON on the page, so try the text as it is first.
            dump = json.loads(match[1]) if match else None
        except (ValueError, RecursionError):
            dump = None
        if isinstance(dump, dict) and isinstance(dump.get("entries"), list):
            found[int(rank)] = dump
        else:
            found[int(rank)] = " ".join(text.split())[:120] or "an empty answer"
    return found
