"""Forked processes of tests behave as interpreters do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import ROOT, ForkedPython, run_python
from tests.support.idle_cores import IdleCores
from tests.waiting import wait_for
from watch.processes import os_state

ENDS = {
    "falls off the end": "import atexit; atexit.register(print, 'bye'); print('hello', flush=True)",
    "a number": "raise SystemExit(7)",
    "nothing": "raise SystemExit",
    "words": "raise SystemExit('no such thing')",
    "an exception": "import sys; print(sys.argv, __name__); raise ValueError('wrong')",
    "a thread": "import threading; threading.Timer(0.2, print, ['late']).start()",
    "a signal": "import os; os.kill(os.getpid(), 9)",
    "Ctrl-C": "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(60)",
    "input": "import sys; print(sys.stdin.read())",
    "a class by its module": "class A: pass\nimport pickle; print(type(pickle.loads(pickle.dumps(A()))))",
}


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_output_and_exit_code_equal_those_of_an_interpreter(code: str, tmp_path: Path) -> None:
    environment = {**os.environ, "ONLY_HERE": "1"}
    real = subprocess.run(
        [sys.executable, "-c", code, "one", "two"], capture_output=True, text=True, cwd=tmp_path, env=environment,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    forked = run_python(["-c", code, "one", "two"], cwd=tmp_path, env=environment)
    assert (forked.returncode, forked.stdout) == (real.returncode, real.stdout)
    assert forked.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]


def test_folder_environment_and_session_are_its_own(tmp_path: Path) -> None:
    code = "import os; print(os.getcwd(), os.environ.get('ONLY_HERE'), os.getpid() == os.getsid(0))"
    done = run_python(["-c", code], cwd=tmp_path, env={"ONLY_HERE": "1"})
    assert done.stdout.split() == [str(tmp_path), "1", "True"]
    assert run_python(["-c", code]).stdout.split() == [os.getcwd(), "None", "True"]


def test_a_process_is_polled_fed_signalled_and_waited_for() -> None:
    code = "print('there', flush=True); print(input(), flush=True); import time; time.sleep(600)"
    with ForkedPython(["-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        assert process.poll() is None
        process.stdin.write("said\n")
        process.stdin.flush()
        assert process.stdout.readline() == "said\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_a_module_and_a_script_are_run_as_main(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(__name__, sys.argv[1:], sys.path[0])")
    assert run_python([str(script), "a"]).stdout == f"__main__ ['a'] {tmp_path}\n"
    assert run_python(["-m", "script", "a"], cwd=tmp_path).stdout == f"__main__ ['a'] {tmp_path}\n"
    told = run_python(["-m", "rankscope", "sql"])
    assert (told.returncode, told.stdout, told.stderr.count("\n")) == (2, "", 1)
    assert "trainer.rank.worker" not in run_python(["-m", "trainer.rank.worker", "none.toml"]).stderr


def test_no_two_processes_draw_the_same() -> None:
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    one, other = (run_python(["-c", code]).stdout.split() for _ in range(2))
    assert not set(one) & set(other)


def test_a_process_that_forks_others_does_so_from_the_same_server() -> None:
    code = (
        "import os; from tests.forked import run_python\n"
        "print(run_python(['-c', 'import os; print(os.getppid())']).stdout.strip() == str(os.getppid()))"
    )
    with ForkedPython(["-c", code], forks=True, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.communicate(timeout=100)[0] == "True\n"
    assert run_python(["-c", "print('the server is still there')"]).returncode == 0


def test_what_a_killed_process_has_started_ends_with_it() -> None:
    """A launcher that a killed test has stopped would stay for good, and a watch would wait for it."""
    code = (
        "import os; from tests.forked import ForkedPython\n"
        "started = ForkedPython(['-c', 'import os, signal; os.kill(os.getpid(), signal.SIGSTOP)'])\n"
        "print(started.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    with ForkedPython(["-c", code], forks=True, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.communicate(timeout=100)[0])
    wait_for(lambda: os_state(pid)[0] in ("", "Z"), "end of the stopped process")


def test_a_process_whose_server_is_gone_has_ended() -> None:
    code = """
import os
from tests.forked import ForkedPython
process = ForkedPython(["-c", "import sys; sys.stdin.read()"], stdin=-1)
server = int(open(f"/proc/{process.pid}/stat").read().rpartition(")")[2].split()[1])
os.kill(server, 9)
print(process.wait(60))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["255"], done.stderr


def test_idle_cores_are_those_of_this_process_alone(tmp_path: Path) -> None:
    stat = tmp_path / "stat"

    def ticks(*cores: tuple[int, int]) -> None:
        lines = [f"cpu{number} {busy} 0 0 {idle} 0 0 0 0 0 0" for number, (busy, idle) in enumerate(cores)]
        stat.write_text("\n".join(["cpu 9 9 9 9 9 9 9 9 9 9", *lines, "ctxt 5"]))

    ticks((100, 100), (100, 100), (100, 100))
    cores = IdleCores(stat, frozenset({0, 2}))
    assert cores.share() == 0.0, "no tick has passed"
    ticks((200, 100), (100, 900), (150, 150))
    assert cores.share() == 50 / 200
    assert IdleCores(tmp_path / "none").share() == 0.0
