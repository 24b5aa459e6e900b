"""Objects of Kubernetes as YAML: read as their JSON is, whatever the texts in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from analyzers.evidence.diagnose_files import diagnose_files
from store.readers.programs.kubernetes_objects import lines as lines_of_json
from store.readers.programs.kubernetes_yaml import lines, recognise
from store.readers.untrusted.external_files import SourceError
from tests.analyzers.evidence.test_pods import ended, listed


def evicted(message: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "List",
        "items": [
            {
                "apiVersion": "v1", "kind": "Event", "reason": "Evicted", "message": message, "eventTime": None,
                "involvedObject": {"kind": "Pod", "name": "train-worker-3"}, "lastTimestamp": "2026-11-26T10:30:00Z",
                "metadata": {"annotations": {"a.b/c": "x: y\n- z\n"}, "managedFields": [{"f:a": {"k:{\"b\"}": {}}}]},
            }
        ],
        "metadata": {"resourceVersion": ""},
    }  # fmt: skip


@pytest.mark.parametrize(
    "message",
    [
        "The node was low on resource: memory.",
        "The node was low on resource: memory. Threshold quantity: 100Mi, available: 12Mi. Container pytorch was using "
        "500Gi, request is 400Gi, has larger consumption of memory.",
        'it\'s "quoted": yes',
        "first\nsecond: line",
        "137",
    ],
)
def test_the_lines_are_those_of_the_json(tmp_path: Path, message: str) -> None:
    document = evicted(message)
    as_json, as_yaml = tmp_path / "events.json", tmp_path / "events.yaml"
    as_json.write_text(json.dumps(document))
    as_yaml.write_text(yaml.safe_dump(document))
    assert recognise(as_yaml.read_bytes())
    if message == "137":  # safe_dump quotes it, as kubectl does
        assert "'137'" in as_yaml.read_text()
    assert list(lines(as_yaml)) == list(lines_of_json(as_json))


def test_a_key_in_another_form_hides_only_the_block_that_has_it(tmp_path: Path) -> None:
    document = evicted("The node was low on resource: memory.")
    (event,) = document["items"]
    # YAML writes `? ` before a key of more than 128 characters.
    event["firstMetadata"] = {"long": {"k" * 150: "value"}, "other": "value"}
    as_json, as_yaml = tmp_path / "events.json", tmp_path / "events.yaml"
    as_json.write_text(json.dumps(document))
    as_yaml.write_text(yaml.safe_dump(document))
    assert "? kkk" in as_yaml.read_text()
    assert list(lines(as_yaml)) == list(lines_of_json(as_json))


@pytest.mark.parametrize("indented", [True, False])
def test_a_pod_that_ran_out_of_memory_is_named(tmp_path: Path, indented: bool) -> None:
    document = json.loads(listed("Failed", ended(137, "OOMKilled")))
    text = "---\n".join(yaml.safe_dump(item) for item in document["items"]) if indented else yaml.safe_dump(document)
    path = tmp_path / "pod.yaml"
    path.write_text(text)
    (found,) = diagnose_files([path]).fired
    assert found.cause == "host_out_of_memory"
    assert "the pod train-worker-2 or its cgroup" in found.summary


def test_manifests_of_other_kinds_and_nonsense_are_safe(tmp_path: Path) -> None:
    assert not recognise(b"apiVersion: batch/v1\nkind: Job\nmetadata:\n  name: a\n")
    path = tmp_path / "pod.yaml"
    path.write_text("apiVersion: v1\nkind: Pod\n? {a: b}\n: - c\n    d\n- e\nstatus:\n  f:\n   g\n")
    assert list(lines(path)) == []
    path.write_text("apiVersion: v1\nkind: Pod\n" + "".join(f"{' ' * n}a:\n" for n in range(200)))
    with pytest.raises(SourceError, match="nested more than 60 deep"):
        list(lines(path))
