"""A rendezvous names its methods as torch does, without reading the stack's sources."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from trainer.launcher.node import Node
from trainer.launcher.nodes.method_names import name_methods_cheaply
from trainer.launcher.nodes.rendezvous import NodeRendezvous


@pytest.fixture
def torch_names() -> Iterator[None]:
    """torch's function before and after."""
    before = dynamic_rendezvous.get_method_name
    yield
    dynamic_rendezvous.get_method_name = before


def record(depth: int) -> str:
    """Stands for `_record`, whose caller is named with a depth of 2."""
    return str(dynamic_rendezvous.get_method_name(depth))


def recording_method(depth: int) -> str:
    return record(depth)


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 10_000])
def test_the_name_is_torchs_at_each_depth(torch_names: None, depth: int) -> None:
    of_torch = recording_method(depth)
    name_methods_cheaply()
    found = recording_method(depth)
    if depth:  # 0 is the function itself, which has another name
        assert found == of_torch
    if depth == 2:
        assert found == "recording_method"


def test_a_rendezvous_reads_no_source(torch_names: None, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    monkeypatch.setattr(inspect, "stack", lambda *arguments: read.append(arguments) or [])
    rendezvous = NodeRendezvous(Node(nproc=1), rejoin_s=1.0)
    recorded: list[str] = []
    monkeypatch.setattr(
        dynamic_rendezvous, "construct_and_record_rdzv_event", lambda **event: recorded.append(event["name"])
    )
    rendezvous.handler.next_rendezvous()
    rendezvous.handler.shutdown()
    assert read == []
    assert any(name.endswith(("._mark_rendezvous_complete", ".next_rendezvous")) for name in recorded)
