"""Read JSON of `dcgmi diag -j` and `dcgmi health -c -j`: failed tests of GPUs, with their messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from store.readers.logs.file_names import host_of_log
from store.readers.programs.dcgmi_table import failed_test, is_of_gpu
from store.readers.programs.rows import ProgramRows
from store.readers.programs.text import read_text
from store.readers.untrusted.external_files import DOCUMENT_BYTES, SourceError

NAME = "dcgmi diag or health as JSON"
_ROOTS = ("DCGM GPU Diagnostic", "DCGM Diagnostic")
"""Name of the root object before and since DCGM 4."""


def recognise(first: bytes) -> bool:
    """Return True if the root object's name is found; the program may print a line before it."""
    is_health = first.lstrip()[:1] == b"{" and b'"Overall Health"' in first and b'"header"' in first
    return is_health or any(f'"{name}"'.encode() in first[:2000] for name in _ROOTS)


def read(path: Path) -> ProgramRows:
    """Read the failed tests. Raises SourceError if the text is not JSON."""
    text = read_text(path, DOCUMENT_BYTES)
    begin = text.find("{")
    try:
        whole, _ = json.JSONDecoder().raw_decode(text[begin:])
    except (ValueError, RecursionError) as error:
        raise SourceError("is cut off or not JSON") from error
    found, host = ProgramRows(), host_of_log(path)
    root: object = next((whole[name] for name in _ROOTS if isinstance(whole, dict) and name in whole), {})
    at = 0
    failed = _failed(root if isinstance(root, dict) else {})
    for test, devices, remark in failed if root else _unhealthy(_object(_object(whole).get("body"))):
        at = max(at, text.find(f'"{test}"', at))
        found.log_events.append(failed_test(test, devices, remark, text.count("\n", 0, at) + 1, host))
    return found


def _failed(root: dict[str, Any]) -> Iterator[tuple[str, list[str], str]]:
    """Yield (test, GPU indices, text) once per failed test."""
    for category in _objects(root.get("test_categories")):
        for test in _objects(category.get("tests")):
            name = str(test.get("name") or test.get("test_name") or "")
            failed = [one for one in _objects(test.get("results")) if str(one.get("status")).lower().startswith("fail")]
            if not name or not failed or not is_of_gpu(name):
                continue
            devices = [number.strip() for one in failed for number in _gpus(one).split(",") if number.strip()]
            remarks = [value for one in failed for value in (one.get("warnings"), one.get("info"))]
            texts = dict.fromkeys(text for value in remarks for text in _texts(value))
            yield name, sorted(dict.fromkeys(devices)), " ".join(texts) or "Fail"


def _unhealthy(body: dict[str, Any]) -> Iterator[tuple[str, list[str], str]]:
    """Yield (system, GPU index, text) for each failed system of a GPU. As in the table, a warning is not a failure."""
    for device, entity in _children(body.get("GPU")):
        for system, result in _children(_object(_object(entity.get("children")).get("Errors"))):
            if str(result.get("value")).startswith("Fail"):
                texts = result.get("overflow")
                yield system, [device], " ".join(_texts(texts if isinstance(texts, list) else [])) or "Fail"


def _children(value: object) -> list[tuple[str, dict[str, Any]]]:
    inside = _object(_object(value).get("children"))
    return [(name, child) for name, child in inside.items() if isinstance(child, dict)]


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _gpus(result: dict[str, Any]) -> str:
    if "entity_id" in result:
        return str(result["entity_id"]) if result.get("entity_group") == "GPU" else ""
    return str(result.get("gpu_ids") or result.get("gpu_id") or "")


def _texts(value: object) -> Iterator[str]:
    for one in value if isinstance(value, list) else [value]:
        text = one.get("warning") or one.get("error") if isinstance(one, dict) else one
        if isinstance(text, str) and text:
            yield text


def _objects(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
