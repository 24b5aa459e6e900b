"""Start the ranks of a preflight if no launcher has started them: on this machine, or on this node of a coming run.

    code = launch_preflight(["--strict"], nproc=8)
    code = launch_preflight([], nproc=8, nnodes="4", node_rank=1, endpoint="gpu-01:29500")

torch's launcher has one exit code for all failures, so the ranks write their exit code to a file.
"""

from __future__ import annotations

import contextlib
import glob
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from probes.attach.launch.own_process import own_process
from trainer.launcher.nodes.endpoint import await_endpoint, host_and_port
from trainer.launcher.nodes.host_address import own_address
from trainer.preflight.verdict.report import EXIT_INCOMPLETE

__all__ = ["CODE_FILE", "launch_preflight", "usual_ranks"]

CODE_FILE = "RANKSCOPE_PREFLIGHT_CODE_FILE"
"""Environment variable with the path of the file to which ranks started by `launch_preflight` write the exit code."""

END_S = 10.0
"""Seconds that the launcher has to end its ranks after a signal."""


def usual_ranks() -> int:
    """Default number of ranks: one per GPU of this machine, or one."""
    return max(1, len(glob.glob("/dev/nvidia[0-9]*")))


def launch_preflight(
    words: Sequence[str], *, nproc: int, nnodes: str = "1", node_rank: int = 0, endpoint: str = ""
) -> int:
    """Run `rankscope preflight WORDS` as `nproc` ranks of this node; returns its exit code. Raises NodeRendezvousError
    if node 0 cannot be reached.
    """
    if nnodes == "1":
        where = ["--standalone"]
    else:
        host, port = host_and_port(endpoint)
        if node_rank:
            await_endpoint(endpoint)
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "rankscope-preflight"]
        where += ["--rdzv-conf", f"is_host={int(node_rank == 0)}"]
        if address := own_address(host, port):
            where += ["--local-addr", address]
    command, environment = own_process(
        "torch.distributed.run", "--nnodes", nnodes, "--nproc-per-node", str(nproc), *where,
        "-m", "rankscope", "preflight", *words,
    )  # fmt: skip
    environment.setdefault("OMP_NUM_THREADS", "1")  # otherwise the launcher sets this variable, with a warning
    with tempfile.TemporaryDirectory(prefix="rankscope-preflight-") as folder:
        file = Path(folder) / "code"
        environment[CODE_FILE] = os.fspath(file)
        code = _run(command, environment)
        if code < 0 or code == 130:
            return 130
        try:
            return int(file.read_text())
        except (OSError, ValueError):
            return EXIT_INCOMPLETE


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the launcher; returns its exit code. After a signal that reaches only this process, the launcher is shut
    down, and ends its ranks."""
    with subprocess.Popen(command, env=environment) as launcher:
        try:
            return launcher.wait()
        except KeyboardInterrupt:  # also raised by the handlers of SIGTERM and SIGHUP
            launcher.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(END_S)
            raise
        finally:
            launcher.kill()  # the ranks exit when the launcher is gone
