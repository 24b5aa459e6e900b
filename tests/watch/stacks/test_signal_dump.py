"""Stacks of a healthy process by signal: it goes on, whatever its other threads do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from analyzers.hangs.stacks import read_stack
from probes.tape.rundir import RunDir
from tests.waiting import wait_for
from watch.stacks.signal_dump import take_stacks

ROOT = Path(__file__).parents[3]
BUSY_RANK = """
import sys, threading
from pathlib import Path
from probes.tape.rundir import RunDir
from probes.tape.stack_file import register

register(RunDir(Path(sys.argv[1])), 0, 0)
def deep(n):
    return deep(n - 1) if n else 0
def frames_come_and_go():
    while True:
        for depth in range(40):
            deep(depth)
        exec("def f(x):\\n return x\\nf(1)", {})
def waits_for_the_threads():
    threading.Event().wait()
for _ in range(3):
    threading.Thread(target=frames_come_and_go, daemon=True).start()
print("there", flush=True)
waits_for_the_threads()
"""


def test_samples_do_not_end_a_process_whose_threads_run(tmp_path: Path) -> None:
    """With the stacks of all threads, 17 samples ended it by SIGSEGV."""
    run, _ = RunDir.adopt(tmp_path / "run")
    rank = subprocess.Popen([sys.executable, "-c", BUSY_RANK, str(run.path)], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"there\n"
        for _ in range(100):
            wait_for(lambda: take_stacks(run, 0, {0: rank.pid}), "an answer", deadline_s=60)
        assert rank.poll() is None
        frames = wait_for(lambda: read_stack(run.stacks, 0, 0), "the whole stack", deadline_s=60)
        assert any(frame.endswith("waits_for_the_threads") for frame in frames)
    finally:
        rank.kill()
        rank.wait()


def test_a_request_after_the_release_kills_no_rank(tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom probes.tape.rundir import RunDir\n"
        "from probes.tape.stack_file import MAIN_THREAD_SIGNAL, register\n"
        "for attempt in range(2):\n"
        "    register(RunDir(Path(sys.argv[1])), attempt, 0)()\n"
        "    os.kill(os.getpid(), MAIN_THREAD_SIGNAL)\n"
        "print(len(list(Path(sys.argv[1], 'stacks').glob('*.ended'))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False, timeout=100,
        cwd=ROOT,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
