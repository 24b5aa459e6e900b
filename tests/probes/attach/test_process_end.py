"""How a process that is attached ends: what its records say, and which line of whose code the report names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from analyzers.diagnose import diagnose
from analyzers.finding import Finding
from probes.tape.rundir import RunDir
from store import Store
from tests.forked import run_python

REPOSITORY = Path(__file__).parents[3]

LOOP = """
import torch
from torch import nn

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""
TWO_LINES = "import rankscope\nrankscope.attach(model, optimizer, watch=False)\n"


def ended(
    tmp_path: Path, end: str, *, by: str, as_module: bool = False, forked: bool = True
) -> tuple[int, list[Finding], str]:
    """Exit code, findings and standard error of a script with these last lines."""
    script = tmp_path / "train.py"
    environment = {**os.environ, "RANKSCOPE_RUN_DIR": str(tmp_path / "run"), "PYTHONPATH": str(REPOSITORY)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RANKSCOPE_FAIL_LOUD"):
        environment.pop(name, None)
    if by == "run":
        script.write_text(f"{LOOP}{end}\n")
        command = ["-m", "rankscope.attached_script", str(script)]
    else:
        script.write_text(f"{LOOP}{TWO_LINES}{end}\n")
        command = [str(script)]
    if as_module:
        package = tmp_path / "site-packages" / "their" / "recipes"
        package.mkdir(parents=True)
        for folder in (package, package.parent):
            (folder / "__init__.py").touch()
        (package / "train.py").write_text(script.read_text())
        environment["PYTHONPATH"] += os.pathsep + str(tmp_path / "site-packages")
        command = ["-m", "rankscope.attached_script", "-m", "their.recipes.train"]
    if forked:
        done = run_python(command, cwd=tmp_path, env=environment)
    else:
        start = [sys.executable, *command]
        done = subprocess.run(start, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    with Store.open(RunDir(tmp_path / "run")) as store:
        found = diagnose(store, {"attached": True}).fired
    return done.returncode, [finding for finding in found if finding.kind == "rank_lost"], done.stderr


@pytest.mark.parametrize(
    ("by", "end", "code", "words"),
    [
        ("run", "train(3)\nraise SystemExit(3)", 3, "exit code 3 (train.py:12 in <module>) at step 3"),
        ("two lines", "import sys\ntrain(3)\nsys.exit(3)", 3, "exit code 3 (train.py:15 in <module>) at step 3"),
        ("two lines", "import sys\ntrain(3)\nsys.exit('no such data set')", 1, "exit code 1: no such data set (train"),
        (
            "two lines",
            "import argparse\ntrain(2)\nargparse.ArgumentParser().parse_args(['--lr'])",
            2,
            "exit code 2 (train.py:15 in <module>)",
        ),
    ],
)
def test_an_exit_with_a_code_or_a_text_is_what_ended_the_rank(
    tmp_path: Path, by: str, end: str, code: int, words: str
) -> None:
    returned, (finding,), _ = ended(tmp_path, end, by=by)
    assert returned == code
    assert (finding.cause, finding.ranks) == ("exit", (0,))
    assert words in finding.summary.replace(f"{tmp_path.name}/", "")


def test_a_caught_exit_and_exit_code_0_are_clean_ends(tmp_path: Path) -> None:
    end = "import sys\ntry:\n    sys.exit(4)\nexcept SystemExit:\n    pass\ntrain(3)\nsys.exit(0)"
    returned, found, _ = ended(tmp_path, end, by="two lines")
    assert (returned, found) == (0, [])


def test_frames_of_the_programs_package_are_user_frames_and_ours_are_not(tmp_path: Path) -> None:
    end = "train(2)\ntry:\n    {}['lr']\nexcept KeyError as error:\n    raise ValueError('no rate') from error"
    returned, (finding,), _ = ended(tmp_path, end, by="run", as_module=True)
    assert returned == 1
    assert "ValueError: no rate (recipes/train.py:15 in <module>)" in finding.summary
    assert not any("attached_script" in frame for frame in finding.evidence["traceback"])


def test_a_loop_in_a_thread_is_recorded_and_its_exception_named(tmp_path: Path) -> None:
    end = (
        "import threading\ndef loop():\n    train(4)\n    raise OSError('disk')\nthreading.Thread(target=loop).start()"
    )
    _, (finding,), _ = ended(tmp_path, end, by="run")
    assert "OSError: disk" in finding.summary
    assert finding.first_step == 4


@pytest.mark.parametrize("by", ["run", "two lines"])
def test_an_exit_from_an_exception_s_handler_is_the_end_by_that_exception(tmp_path: Path, by: str) -> None:
    end = "import sys\ntrain(2)\ntry:\n    int('x')\nexcept ValueError as error:\n    print(error)\n    sys.exit(1)"
    returned, (finding,), _ = ended(tmp_path, end, by=by)
    assert returned == 1
    assert finding.cause == "exception"
    assert "died of ValueError: invalid literal" in finding.summary
    assert f"train.py:{14 if by == 'run' else 16} in <module>" in finding.summary


PRINTED = "import sys\ntrain(2)\ntry:\n    int('x')\nexcept ValueError as error:\n    sys.excepthook(*sys.exc_info())\n"


def test_an_exception_that_the_script_passes_to_the_hook_is_not_its_end(tmp_path: Path) -> None:
    returned, findings, printed = ended(tmp_path, f"{PRINTED}train(2)", by="two lines")
    assert (returned, findings) == (0, [])
    assert "ValueError" in printed


def test_an_exit_after_an_exception_passed_to_the_hook_is_the_end_by_that_exception(tmp_path: Path) -> None:
    returned, (finding,), _ = ended(tmp_path, f"{PRINTED}sys.exit(4)", by="two lines")
    assert returned == 4
    assert "died of ValueError: invalid literal" in finding.summary


@pytest.mark.parametrize("by", ["run", "two lines"])
def test_an_exception_is_recorded_where_the_script_has_replaced_the_hook(tmp_path: Path, by: str) -> None:
    """typer's and rich's print a traceback of their own, and call no other."""
    end = "import sys\nsys.excepthook = lambda *error: None\ntrain(2)\n{}['lr']"
    returned, (finding,), _ = ended(tmp_path, end, by=by, forked=by == "run")
    assert returned == 1
    line = 14 if by == "run" else 16
    said = finding.summary.replace(f"{tmp_path.name}/", "")
    assert f"died of KeyError: 'lr' (train.py:{line} in <module>) at step 2" in said


def test_the_traceback_of_an_interrupt_has_frames_of_the_script_only(tmp_path: Path) -> None:
    end = (
        "import os, signal\ntrain(2)\nmodel.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGINT))\n"
        "train(1)"
    )
    _, _, error = ended(tmp_path, end, by="run")
    assert "train.py" in error
    assert "\nKeyboardInterrupt\n" in error
    assert "attached_script.py" not in error
    assert f"{os.sep}probes{os.sep}" not in error


def test_an_exit_on_an_interrupt_is_not_a_failure_of_the_rank(tmp_path: Path) -> None:
    """As click ends a program at Ctrl-C."""
    end = (
        "import sys\ntrain(3)\ntry:\n    try:\n        raise KeyboardInterrupt\n    except KeyboardInterrupt as e:\n"
        "        raise ValueError('Aborted') from e\nexcept ValueError:\n    sys.exit(1)"
    )
    code, findings, _ = ended(tmp_path, end, by="run")
    assert code == 1
    assert [finding for finding in findings if "exit code 1" in finding.summary] == []
    with Store.open(RunDir(tmp_path / "run")) as store:
        assert store.rows("SELECT count(*) FROM events WHERE kind = 'exception'") == [(0,)]


LOST_THREAD = """
import queue, threading
batches = queue.Queue()
def prefetch():
    batches.put(1)
    raise ValueError("bad record")
thread = threading.Thread(target=prefetch, name="prefetch")
thread.start()
thread.join()
"""


def test_an_exception_of_another_thread_is_named_where_the_loop_fails_because_of_it(tmp_path: Path) -> None:
    _, (finding,), printed = ended(
        tmp_path, f"train(2)\n{LOST_THREAD}\nbatches.get()\nbatches.get(timeout=0.1)", by="run"
    )
    assert "bad record" in printed
    assert "died of Empty" in finding.summary
    text = "Thread prefetch of rank 0 ended at step 2 with ValueError: bad record (train.py:17 in prefetch)."
    assert text in finding.summary.replace(f"{tmp_path.name}/", "")


def test_an_exception_of_another_thread_does_not_end_the_rank(tmp_path: Path) -> None:
    returned, found, _ = ended(tmp_path, f"{LOST_THREAD}\ntrain(3)", by="two lines")
    assert (returned, found) == (0, [])
