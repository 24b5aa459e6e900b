"""The signals for stacks, in a script with handlers of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from probes.tape.rundir import RunDir

SCRIPT = """
import os, signal, sys
from pathlib import Path
from probes.tape.rundir import RunDir
from probes.tape.stack_file import register

release = register(RunDir(Path(sys.argv[1])), 0, 0)
signal.signal(signal.SIGUSR2, lambda *unused: print("preempted", flush=True))
os.kill(os.getpid(), signal.SIGUSR2)
release()
os.kill(os.getpid(), signal.SIGUSR2)
"""


def test_a_handler_that_the_script_sets_later_stays_after_the_release(tmp_path: Path) -> None:
    RunDir(tmp_path).stacks.parent.mkdir(exist_ok=True)
    done = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "preempted\n" * 2), done.stderr
