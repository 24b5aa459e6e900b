"""A launcher is never silent because the store of the rendezvous is, and knows under which address it is reached."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousConnectionError

from tests.waiting import wait_for
from trainer.launcher.nodes import host_address as module
from trainer.launcher.nodes.host_address import gloo_interface, is_own, own_address
from trainer.launcher.nodes.rendezvous_handler import ResponsiveHandler


class Silent:
    """A handler whose store does not answer until `power` is back."""

    def __init__(self) -> None:
        self.power = threading.Event()
        self.asked = threading.Event()
        self.num_answers = 0
        self.waiting = 2

    def _ask(self, answer: Any) -> Any:
        self.asked.set()
        self.power.wait(60)
        self.num_answers += 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    def next_rendezvous(self) -> Any:
        return self._ask("info")

    def num_nodes_waiting(self) -> Any:
        return self._ask(self.waiting)

    def shutdown(self) -> Any:
        return self._ask(True)


@pytest.fixture
def silent() -> Iterator[Silent]:
    handler = Silent()
    yield handler
    handler.power.set()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def endpoint(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_look_at_the_ranks_never_waits_for_the_store(silent: Silent, listener: socket.socket) -> None:
    patient = ResponsiveHandler(silent, endpoint(listener))  # type: ignore[arg-type]
    assert [patient.num_nodes_waiting() for _ in range(100)] == [0] * 100
    assert silent.num_answers == 0
    assert silent.asked.wait(60)
    silent.power.set()
    wait_for(patient.num_nodes_waiting, "the nodes that wait")
    assert patient.num_nodes_waiting() == 2
    silent.waiting = 0
    assert patient.next_rendezvous() == "info"
    assert patient.num_nodes_waiting() == 0, "who waited before the round is in it"


def test_rendezvous_fails_without_an_endpoint_and_waits_with_one(silent: Silent, listener: socket.socket) -> None:
    where = endpoint(listener)
    patient = ResponsiveHandler(silent, where, lost_s=0.5)  # type: ignore[arg-type]
    threading.Timer(1.5, silent.power.set).start()
    assert patient.next_rendezvous() == "info", "the others may be late as long as the store can be reached"
    silent.power.clear()
    listener.close()
    start = time.monotonic()
    with pytest.raises(RendezvousConnectionError, match=f"The rendezvous at {where} was not reached"):
        patient.next_rendezvous()
    assert time.monotonic() - start < 50, "not as long as the store is silent"


def test_what_torch_raises_is_raised(listener: socket.socket) -> None:
    class Closed:
        def next_rendezvous(self) -> Any:
            raise RendezvousClosedError

    with pytest.raises(RendezvousClosedError):
        ResponsiveHandler(Closed(), endpoint(listener)).next_rendezvous()  # type: ignore[arg-type]


def test_leaving_takes_no_longer_than_it_may(
    silent: Silent, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.launcher.nodes.rendezvous_handler.LEAVE_S", 0.2)
    patient = ResponsiveHandler(silent, endpoint(listener))  # type: ignore[arg-type]
    assert not patient.shutdown()
    monkeypatch.setattr("trainer.launcher.nodes.rendezvous_handler.LEAVE_S", 60.0)
    silent.power.set()
    assert patient.shutdown()


def test_which_addresses_are_ones_own() -> None:
    assert is_own("127.0.0.1")
    assert is_own("localhost")
    assert not is_own("192.0.2.1"), "an address for documentation, nobody's"
    assert not is_own("no.such.host.invalid")
    assert own_address("127.0.0.1", 29500) == "127.0.0.1"
    assert own_address("no.such.host.invalid", 29500) is None


@pytest.mark.parametrize(
    ("named", "told"), [(["127.0.1.1"], True), ([], True), (["127.0.1.1", "10.0.0.7"], False), (["10.0.0.7"], False)]
)
def test_gloo_gets_an_interface_if_the_host_name_does_not_resolve(
    named: list[str], told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loopback stands for the interface here: every machine has it."""
    monkeypatch.setattr(module, "_addresses", lambda host: [(0, 0, 0, "", (address, 0)) for address in named])
    monkeypatch.setattr(module, "_is_loopback", lambda address: address.startswith("127.0.1."))
    assert gloo_interface("127.0.0.1") == ("lo" if told else None)
    assert gloo_interface(None) is None
    assert gloo_interface("127.0.1.1") is None
