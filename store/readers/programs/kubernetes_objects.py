"""Convert Kubernetes objects in JSON (`kubectl get events,pods -o json`) to one log line per event and ended container,
for the rules of text logs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from store.readers.programs.text import read_chunks
from store.readers.untrusted.json_stream import members

NAME = "events or pods of Kubernetes as JSON"


def recognise(first: bytes) -> bool:
    """Return True for a list of objects, an event or a pod."""
    if first.lstrip()[:1] != b"{" or b'"apiVersion"' not in first:
        return False
    kinds = (b'"Event"', b'"EventList"', b'"Pod"', b'"PodList"')
    return any(kind in first for kind in kinds)


def lines(path: Path) -> Iterator[str]:
    """Events in order of time, then the states of pods."""
    items: list[dict[str, Any]] = []
    single: dict[str, Any] = {}
    for key, value, is_item in members(read_chunks(path), {"items"}):
        if is_item and isinstance(value, dict):
            items.append(value)
        elif not is_item:
            single[key] = value
    yield from lines_of(items or [single])


def lines_of(objects: list[dict[str, Any]]) -> Iterator[str]:
    """Log lines for the events and pods among parsed objects."""
    events = [item for item in objects if "involvedObject" in item or "regarding" in item]
    for event in sorted(events, key=_time):
        involved = _dict(event.get("involvedObject") or event.get("regarding"))
        text = _text(event.get("message") or event.get("note"))
        yield f"{_time(event)} {_text(involved.get('kind')).lower()}/{_text(involved.get('name'))} " \
              f"{_text(event.get('reason'))}: {text}".strip()  # fmt: skip
    pods = [item for item in objects if "status" in item and "spec" in item]
    for pod in pods:
        yield from _ends(pod)
    if pods and all(_dict(pod["status"]).get("phase") == "Succeeded" for pod in pods):
        others = f" and {len(pods) - 1} other{'s' * (len(pods) > 2)}" if len(pods) > 1 else ""
        yield f"pod/{_text(_dict(pods[0].get('metadata')).get('name'))}{others}: phase Succeeded"


def _ends(pod: dict[str, Any]) -> Iterator[str]:
    name, status = _text(_dict(pod.get("metadata")).get("name")), _dict(pod.get("status"))
    node = _text(_dict(pod.get("spec")).get("nodeName"))
    if reason := _text(status.get("reason")):
        where = f"node {node}" if node and reason == "NodeLost" else f"pod/{name}"
        yield f"{where} {reason}: {_text(status.get('message'))}"
    for container in (*_list(status.get("initContainerStatuses")), *_list(status.get("containerStatuses"))):
        place = f"pod/{name} container {_text(_dict(container).get('name'))}"
        for name_of_state in ("lastState", "state"):
            state = _dict(_dict(container).get(name_of_state))
            ended, waits = _dict(state.get("terminated")), _dict(state.get("waiting"))
            if ended and ended.get("exitCode") != 0:
                end = f"{_text(ended.get('reason'))}, exit code {ended.get('exitCode')}"
                yield f"{_text(ended.get('finishedAt'))} {place} terminated: {end}".strip()
            if waits:
                yield f"{place} waits: {_text(waits.get('reason'))} {_text(waits.get('message'))}".strip()


def _time(event: dict[str, Any]) -> str:
    return _text(event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp"))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value.replace("\n", " ")[:2000] if isinstance(value, str) else ""
