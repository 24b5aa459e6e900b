"""Somebody's training script, run as so many ranks: forked from a process that has imported torch, as torchrun would
set their variables. Their watch is a fork, too.

    ranks = ScriptRanks(script, "--steps", "50", cwd=tmp_path, world_size=4, run_dir=tmp_path / "run")
    ranks.pids[2]
    ranks.join()
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path

from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from tests.forked import ForkedPython
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "attach"
_PRELOADED: list[str] = []


def preload(*modules: str) -> None:
    """Import these once for the ranks of all tests: called where a module of tests is imported, before any rank."""
    _PRELOADED.extend(modules)


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED, __name__])
    return context


def _run(script: str, arguments: list[str], cwd: str, environment: dict[str, str], log: str) -> None:
    os.chdir(cwd)
    os.environ.update(environment)
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


class _Preloaded:
    """A rank forked from a process that has imported `_PRELOADED`, with the methods of `ForkedPython` used here."""

    def __init__(self, script: Path, arguments: list[str], cwd: Path, environment: dict[str, str], log: Path) -> None:
        self._process = _context().Process(target=_run, args=(str(script), arguments, str(cwd), environment, str(log)))
        self._process.start()
        self.pid = self._process.pid or 0

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float) -> int | None:
        self._process.join(timeout_s)
        return self._process.exitcode


class ScriptRanks:
    """The processes; whatever of them is left at the end of a `with` is killed."""

    def __init__(
        self,
        script: Path,
        *arguments: str,
        cwd: Path,
        world_size: int = 2,
        run_dir: Path | None = None,
        unattended: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        port = free_port()
        common = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": str(port), "RANKSCOPE_FAIL_LOUD": "1", "OMP_NUM_THREADS": "1"}
        common |= {"RANKSCOPE_RUN_DIR": str(run_dir)} if run_dir else {}
        common |= variables or {}
        self.cwd, self.run_dir, self.script = cwd, run_dir, script
        self.processes: list[ForkedPython | _Preloaded] = []
        words = ["-m", "rankscope.attached_script"] if unattended else []
        for rank in range(world_size):
            environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            path = cwd / f"{script.stem}-rank{rank}.log"
            if _PRELOADED and not unattended:
                self.processes.append(_Preloaded(script, [*arguments], cwd, environment, path))
                continue
            with path.open("w") as log:
                self.processes.append(
                    ForkedPython(
                        [*words, str(script), *arguments], forks_python=True, cwd=cwd, env=environment,
                        stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    )
                )  # fmt: skip

    def __enter__(self) -> ScriptRanks:
        return self

    def __exit__(self, *unused: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait(100)
        if self.run_dir is not None:
            for event in read_events(RunDir(self.run_dir).node_dir(0) / "events.jsonl")[0]:
                if event["kind"] == "watch_started" and Path(f"/proc/{event['pid']}").exists():
                    os.kill(event["pid"], signal.SIGTERM)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def join(self, deadline_s: float = 100.0) -> ScriptRanks:
        """Wait for the end of all of them; each must end well."""
        deadline = time.monotonic() + deadline_s
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        codes = [process.poll() for process in self.processes]
        assert codes == [0] * len(codes), f"exit codes {codes}\n{self.stacks()}\n{self.logs()}"
        return self

    def stacks(self) -> str:
        """Python stacks of the ranks that still run."""
        spy = Path(sys.executable).with_name("py-spy")
        running = [process for process in self.processes if process.poll() is None]
        dumps = [
            subprocess.run([spy, "dump", "--pid", str(process.pid)], capture_output=True, text=True, check=False)
            for process in running
        ]
        return "\n".join(dump.stdout + dump.stderr for dump in dumps)

    def logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.cwd.glob(f"{self.script.stem}-rank*.log")))
