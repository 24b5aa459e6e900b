"""How a job's pods ended, in the objects of Kubernetes and in `kubectl describe pod`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analyzers.diagnose import Diagnosis
from analyzers.evidence.diagnose_files import diagnose_files


def ended(code: int, reason: str) -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, "finishedAt": "2026-11-26T10:00:00Z"}}


def listed(phase: str, state: dict[str, Any], *, last: dict[str, Any] | None = None, init: bool = False) -> str:
    container = {"name": "pytorch", "state": state, "lastState": last or {}}
    status = {"phase": phase, "initContainerStatuses" if init else "containerStatuses": [container]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "train-worker-2"}, "spec": {}, "status": status}
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [pod]}, indent=4)


def described(status: str, state: str, reason: str, code: int) -> str:
    return (
        f"Name:             train-worker-2\nNamespace:        ml\nStatus:           {status}\nContainers:\n  pytorch:\n"
        f"    State:          {state}\n      Reason:       {reason}\n      Exit Code:    {code}\nEvents:  <none>\n"
    )


def diagnosed(tmp_path: Path, text: str) -> Diagnosis:
    path = tmp_path / "pods.txt"
    path.write_text(text)
    return diagnose_files([path])


@pytest.mark.parametrize(
    "text",
    [
        listed("Failed", ended(3, "Error")),
        listed("Running", {"running": {}}, last=ended(3, "Error")),
        listed("Pending", {"waiting": {"reason": "PodInitializing"}}, last=ended(3, "Error"), init=True),
        described("Failed", "Terminated", "Error", 3),
    ],
)
def test_a_container_that_failed_is_suspected_with_its_code(tmp_path: Path, text: str) -> None:
    (found,) = diagnosed(tmp_path, text).fired
    assert (found.status, found.cause) == ("suspect", "exit")
    assert "train-worker-2 ended with exit code 3" in found.summary


@pytest.mark.parametrize(
    "text",
    [
        listed("Running", {"running": {}}, last=ended(137, "OOMKilled")),
        described("Failed", "Terminated", "OOMKilled", 137),
    ],
)
def test_a_pod_is_no_host(tmp_path: Path, text: str) -> None:
    (found,) = diagnosed(tmp_path, text).fired
    assert found.cause == "host_out_of_memory"
    assert "because the pod train-worker-2 or its cgroup ran out of memory" in found.summary


@pytest.mark.parametrize(
    "text", [listed("Succeeded", ended(0, "Completed")), described("Succeeded", "Terminated", "Completed", 0)]
)
def test_pods_that_completed_have_finished(tmp_path: Path, text: str) -> None:
    found = diagnosed(tmp_path, text)
    assert (found.fired, found.run["ended"]) == ((), "finished")


def test_a_pod_that_never_starts_is_suspected(tmp_path: Path) -> None:
    (found,) = diagnosed(tmp_path, listed("Pending", {"waiting": {"reason": "ImagePullBackOff"}})).fired
    assert found.cause == "launch_failed"
    assert diagnosed(tmp_path, listed("Running", {"running": {}})).fired == ()


@pytest.mark.parametrize(
    "text",
    [
        "Name:         train-worker-2\nNamespace:    ml\nStatus:       Failed\nReason:       Evicted\n"
        "Message:      The node was low on resource: ephemeral-storage. Container pytorch was using 9Gi.\nIP:\n",
        "LAST SEEN   TYPE      REASON    OBJECT               MESSAGE\n"
        "12m         Warning   Evicted   pod/train-worker-2   Pod ephemeral local storage usage exceeds the limit.\n",
    ],
)
def test_an_evicted_pod_is_named(tmp_path: Path, text: str) -> None:
    (found,) = diagnosed(tmp_path, text).fired
    assert found.cause == "disk_full"
    assert "train-worker-2" in found.summary


EVENTS = """\
$ kubectl get events -n ml
LAST SEEN   TYPE      REASON         OBJECT            MESSAGE
9m          Normal    Started        pod/worker-3      Started container pytorch
6m12s       Warning   NodeNotReady   pod/worker-3      Node is not ready
6m10s       Normal    NodeNotReady   node/gpu-17       Node gpu-17 status is now: NodeNotReady
"""
PODS = """\
NAME       READY   STATUS      RESTARTS   AGE
worker-0   0/1     {0}       0          4h
worker-2   0/1     {1}   0          4h
"""
LOST = """\
Name:             worker-2
Namespace:        ml
Node:             gpu-17/10.0.3.17
Status:           Failed
Reason:           NodeLost
Containers:
  pytorch:
    State:          Terminated
      Reason:       Error
      Exit Code:    255
"""

LOST_JSON = json.dumps(
    {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "worker-2"}, "spec": {"nodeName": "gpu-17"},
     "status": {"phase": "Failed", "reason": "NodeLost", "message": "unresponsive"}}
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "cause", "named"),
    [
        (EVENTS, "node_failed", "gpu-17"),
        (EVENTS.replace("LAST", "NAMESPACE   LAST").replace("\n6m", "\nml   6m"), "node_failed", "gpu-17"),
        (PODS.format("Error", "OOMKilled"), "host_out_of_memory", "worker-2"),
        (LOST, "node_failed", "gpu-17"),
        (LOST_JSON, "node_failed", "gpu-17"),
    ],
)
def test_tables_of_kubectl_name_the_node_or_pod(tmp_path: Path, text: str, cause: str, named: str) -> None:
    found = diagnosed(tmp_path, text).fired[0]
    assert found.cause == cause
    assert named in found.summary
    line = int(str(found.evidence["basis"]).split("pods.txt:")[1].split(":")[0])
    assert found.cause != "host_out_of_memory" or text.splitlines()[line - 1].startswith(named)


def test_pods_of_a_table_that_all_completed_finished(tmp_path: Path) -> None:
    assert diagnosed(tmp_path, PODS.format("Completed", "Completed")).run["ended"] == "finished"
    assert diagnosed(tmp_path, PODS.format("Running", "Completed")).run["ended"] != "finished"
