"""An endpoint that no launcher listens at is named in one line, before torch tries it."""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path

import pytest

from rankscope.cli import main
from trainer.launcher.node import Node, NodeRendezvousError
from trainer.launcher.nodes import endpoint
from trainer.launcher.nodes.endpoint import await_endpoint, await_torchrun, host_and_port
from trainer.launcher.nodes.rendezvous import NodeRendezvous


@pytest.mark.parametrize(
    ("given", "expected"),
    [("gpu-01:29500", ("gpu-01", 29500)), ("[fe80::1]:80", ("fe80::1", 80)), ("gpu-01", ("gpu-01", 29400)),
     ("[fe80::1]", ("fe80::1", 29400))],
)  # fmt: skip
def test_host_and_port(given: str, expected: tuple[str, int]) -> None:
    assert host_and_port(given, default_port=29400) == expected


@pytest.mark.parametrize("given", ["", "gpu-01", "gpu-01:", "gpu-01:0", "gpu-01:65536", "gpu-01:x", ":29500", "a:-1"])
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(NodeRendezvousError, match="HOST:PORT"):
        host_and_port(given)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_name_that_does_not_resolve_and_a_port_without_a_listener_are_named() -> None:
    with pytest.raises(NodeRendezvousError, match=r"the name no-such-host.invalid cannot be resolved"):
        await_endpoint("no-such-host.invalid:29500", within_s=0.0)
    with pytest.raises(NodeRendezvousError, match=r"no launcher listens there .Connection refused.; start that node"):
        await_endpoint(f"127.0.0.1:{closed_port()}", within_s=0.0)


def test_a_node_that_starts_later_is_waited_for() -> None:
    port, begun = closed_port(), threading.Event()

    def wait() -> None:
        await_endpoint(f"127.0.0.1:{port}")
        begun.set()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    with socket.create_server(("127.0.0.1", port)):
        assert begun.wait(60)


@pytest.mark.parametrize(
    ("given", "conf"),
    [("localhost:0", ""), ("this-machine.invalid:29500", ""), ("/shared/rendezvous", "store_type=file"),
     ("gpu-01.invalid:29500", "read_timeout=5, is_host=true")],
    ids=["free port", "own name with the address of a service", "file", "told to host"],
)  # fmt: skip
def test_a_rendezvous_that_torch_hosts_itself_is_not_waited_for(
    given: str, conf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "REACH_S", 0.0)
    monkeypatch.setattr(socket, "gethostname", lambda: "this-machine.invalid")
    await_torchrun(given, conf)


def test_the_other_node_may_take_as_long_as_torch_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "REACH_S", 0.0)
    with pytest.raises(NodeRendezvousError, match=r"cannot be resolved .*, tried for 1 s"):
        await_torchrun("gpu-01.invalid:29500", "read_timeout=1")


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "no-such-host.invalid:29500", "x.py"],
        ["run", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:x", "x.py"],
        ["run", "--nnodes", "2", "--rdzv-backend", "c10", "--rdzv-endpoint", "localhost:1", "x.py"],
        ["run", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-conf", "is_host", "--rdzv-endpoint", "a:1", "x.py"],
        ["train", "debug", "--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "no-such-host.invalid:29500"],
        ["train", "debug", "--preflight", "--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "nowhere.invalid:1"],
    ],
    ids=["run", "no port", "backend", "conf", "train", "preflight"],
)
def test_a_command_says_it_in_one_line_and_makes_no_folder(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(endpoint, "REACH_S", 0.0)
    monkeypatch.setattr(sys, "argv", ["rankscope", *arguments])
    Path("x.py").write_text("print(1)\n")
    with pytest.raises(SystemExit) as ended:
        main()
    told = capfd.readouterr()
    assert (ended.value.code, told.out, len(told.err.strip().splitlines())) == (2, "", 1), told
    assert told.err.startswith("rankscope: ")
    assert [path.name for path in tmp_path.iterdir()] == ["x.py"]


def test_nodes_that_were_launched_with_different_numbers_are_refused(tmp_path: Path) -> None:
    port = closed_port()

    def node(rank: int, most: int) -> Node:
        return Node(nproc=1, rank=rank, min_nodes=2, max_nodes=most, endpoint=f"localhost:{port}")

    first = NodeRendezvous(node(0, 2), rejoin_s=1.0)
    (tmp_path / "run").mkdir(mode=0o700)
    assert first.agree_on_run(lambda: tmp_path / "run") == tmp_path / "run"
    with pytest.raises(NodeRendezvousError, match=r"--nnodes 2:3: the first node of localhost:.* has --nnodes 2:2"):
        NodeRendezvous(node(1, 3), rejoin_s=1.0).agree_on_run(lambda: tmp_path)
