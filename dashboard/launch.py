"""Start the dashboard's server and wait for its end.

    with DashboardServer(Path("runs"), port=8501) as server:
        server.url                  # http://127.0.0.1:8501
        server.wait()

The server is Streamlit's, in a separate process (`serve`) that ends with this one. It listens on the loopback address.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from analyzers.report.wording.links import DEFAULT_PORT
from dashboard import token_file as token_files
from probes.attach.launch.own_process import own_process
from probes.tape.no_run import no_folder
from store.database import Closing
from store.open import classify

__all__ = ["LOOPBACK", "DashboardError", "DashboardServer", "usable_port"]

READY_S = 60.0
PORT_TRIES = 3
"""Attempts to find a free port, since another process may take it before the server does."""
LOOPBACK = "127.0.0.1"


class DashboardError(ValueError):
    """The dashboard cannot be started; the message is one line: what, where, what to do."""


class _EndedError(DashboardError):
    """The server ended before it was ready."""


class DashboardServer(Closing):
    """The server process. Raises DashboardError."""

    def __init__(self, runs: Path, *, port: int, token_file: Path | None = None) -> None:
        folder, run_id = _folder_and_run(runs)
        if importlib.util.find_spec("streamlit") is None:
            raise DashboardError("streamlit is not installed: pip install 'rankscope[dashboard]'")
        token = _token_variable(token_file)
        command, environment = own_process("dashboard.serve")
        command += ["--server.address", LOOPBACK, "--server.headless", "true"]
        environment |= {"RANKSCOPE_DASHBOARD_RUNS": str(folder), "RANKSCOPE_DASHBOARD_RUN": run_id}
        environment = {name: value for name, value in environment.items() if name != token_files.VARIABLE} | token
        environment["RANKSCOPE_DASHBOARD_PARENT"] = str(os.getpid())
        for tries_left in reversed(range(1 if port else PORT_TRIES)):
            chosen = _free_port(port)
            try:
                self._start([*command, "--server.port", str(chosen)], environment, f"http://{LOOPBACK}:{chosen}")
                break
            except _EndedError:
                if not tries_left or _is_free(chosen):
                    raise

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def wait(self) -> int:
        """Wait until the server exits; returns its exit code."""
        return self._process.wait()

    def close(self) -> None:
        """Stop the server."""
        if self._process.poll() is None:
            self._process.terminate()  # do not send SIGINT: a server that is still starting would print a traceback
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _start(self, command: list[str], environment: dict[str, str], url: str) -> None:
        """Start the server at an address, and wait until it responds."""
        self.url = url
        self._process = subprocess.Popen(  # standard error is inherited, so that errors are visible
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )
        try:
            self._await_ready()
        except BaseException:
            self.close()
            raise

    def _await_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise _EndedError(f"Streamlit ended with exit code {self._process.returncode}: see its output above")
            try:
                with urllib.request.urlopen(f"{self.url}/_stcore/health", timeout=2) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise DashboardError(f"the server did not answer at {self.url} within {READY_S:.0f} s: try again")


def _token_variable(token_file: Path | None) -> dict[str, str]:
    """Environment variable with the path of the token file. Raises DashboardError if the file is not safe."""
    if token_file is None:
        return {}
    try:
        token_files.read_token(token_file)
    except ValueError as error:
        raise DashboardError(str(error)) from None
    return {token_files.VARIABLE: str(token_file.resolve())}


def _folder_and_run(runs: Path) -> tuple[Path, str]:
    """Return the folder of runs, and the run to open if `runs` is a run."""
    found = classify(runs)
    if found.kind in ("address", "missing"):
        raise DashboardError(no_folder(runs))
    if not runs.is_dir():
        raise DashboardError(f"{no_folder(runs)}; unpack a shared run first")
    path = runs.resolve()
    return (path.parent, path.name) if found.kind == "run" else (path, "")


def usable_port(preferred: int = DEFAULT_PORT) -> int:
    """Return the preferred port if it is free, or else any free port. By default the preferred port is the one in the
    links of reports."""
    return _free_port(preferred if _is_free(preferred) else 0)


def _is_free(port: int) -> bool:
    try:
        _free_port(port)
    except DashboardError:
        return False
    return True


def _free_port(port: int) -> int:
    """Return the port, or a free one for 0. Raises DashboardError if it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            hint = "choose another with --port, or --port 0 for any free one"
            raise DashboardError(f"cannot listen on {LOOPBACK}:{port}: {error.strerror}; {hint}") from None
        free: int = probe.getsockname()[1]
        return free
