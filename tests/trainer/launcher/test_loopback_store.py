"""The stores of a launch on one machine listen on loopback alone, as the kernel lists them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.depth import later
from tests.forked import run_python
from trainer.launcher.loopback_store import loopback_store
from trainer.launcher.node import Node
from trainer.launcher.nodes.rendezvous import NodeRendezvous

LOOPBACK = "0100007F"
SCRIPT = """
import os
import torch.distributed as dist
from tests.trainer.launcher.test_loopback_store import listening
dist.init_process_group("gloo")
dist.barrier()
line = " ".join(("HEARD", os.environ["MASTER_ADDR"], *listening(os.getppid())))
os.write(1, f"{line}\\n".encode())  # whole: the other rank writes to the same pipe
dist.barrier()
"""


def listening(pid: int) -> set[str]:
    """Addresses at which a process listens, as hexadecimal `address` of /proc/net."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


def test_a_store_of_ours_is_reached_on_loopback_only() -> None:
    before = listening(os.getpid())
    store = loopback_store()
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert listening(os.getpid()) - before <= {LOOPBACK}


def test_a_round_of_one_node_opens_nothing_else() -> None:
    before = listening(os.getpid())
    handler = NodeRendezvous(Node(nproc=1), rejoin_s=1.0).handler
    joined = handler.next_rendezvous()
    assert joined.bootstrap_store_info.master_port > 0
    assert listening(os.getpid()) - before <= {LOOPBACK}
    handler.shutdown()


@pytest.mark.parametrize("options", [(), pytest.param(("--standalone",), marks=later("without it"))])
def test_a_script_on_one_machine_is_launched_on_loopback(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    root = Path(__file__).parents[3]
    command = ["-m", "rankscope", "run", *options, "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = run_python(command, cwd=tmp_path, env=environment, timeout_s=110, forks_python=True)
    heard = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("HEARD")]
    assert heard == [["localhost", LOOPBACK]] * 2, done.stdout + done.stderr
