"""Who can reach the rendezvous' store: only this machine for one node, and never with a program in a pickle."""

from __future__ import annotations

import os
import pickle
from datetime import UTC, datetime
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import Token, _NodeDesc, _RendezvousState

from trainer.launcher.node import NodeRendezvousError
from trainer.launcher.nodes.rendezvous import check_owner
from trainer.launcher.nodes.safe_state import SafeStateBackend, check_state


class Backend:
    """A store in which somebody else has put a state."""

    name = "c10d"

    def __init__(self, state: bytes) -> None:
        self.state = state

    def get_state(self) -> tuple[bytes, Token]:
        return self.state, 0

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool]:
        return self.state, 0, False


class Program:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_program_in_the_state_is_refused_and_not_run(tmp_path: Path) -> None:
    backend = SafeStateBackend(Backend(pickle.dumps(Program(tmp_path / "made"))))  # type: ignore[arg-type]
    for call in (backend.get_state, lambda: backend.set_state(b"")):
        with pytest.raises(RendezvousStateError, match="refused"):
            call()
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("blob", [b"", b"x", b"\x80\x04", b"(" * 1000])
def test_damaged_states_are_refused(blob: bytes) -> None:
    with pytest.raises(RendezvousStateError):
        check_state(blob)


def test_the_state_that_torch_writes_is_read() -> None:
    state, node = _RendezvousState(), _NodeDesc("node-0", 4711, 0)
    state.participants[node] = 0
    state.wait_list = {node}
    state.last_heartbeats[node] = state.deadline = datetime.now(UTC)
    check_state(pickle.dumps(state))


def test_a_run_folder_that_others_can_write_is_not_joined(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    check_owner(tmp_path)
    for mode in (0o770, 0o707, 0o1777):
        tmp_path.chmod(mode)
        with pytest.raises(NodeRendezvousError, match="other users can write it"):
            check_owner(tmp_path)
    tmp_path.chmod(0o700)
