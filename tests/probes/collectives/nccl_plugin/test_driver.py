"""The plugin under the driver in C: sanitizers, valgrind, kills at random moments."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cost.nccl_plugin import Kill, _compare, compile_driver, kill_driver, measure, start_driver
from probes.collectives.nccl_plugin.build import BuildError, compile_plugin
from probes.tape.format.reader import read_segment, segment_paths
from probes.tape.format.schema import TABLES
from probes.tape.format.writer import COMPLETE, MAGIC, OPEN, TapeWriter
from tests.support.played.nccl_interface import VERSIONS

ALL_EVENTS = "calls,kernels,links,channels,steps"


@pytest.fixture(scope="module")
def driver(plugin_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("driver") / "nccl_driver"
    compile_driver(path, ["-Werror"])
    return path


def check(driver: Path, library: Path, tape: Path, *, version: int, calls: int, before: tuple[str, ...] = ()) -> None:
    """Four threads with reporters of their own; the driver ends well and says nothing, and the tapes are whole.

    The driver may end while the plugin's thread creates the next segment, which then has no header yet.
    """
    command, library, *words = (Path(word) for word in (*before, driver, library))
    process = start_driver(command, library, tape, words=[*words, version, 4, calls, "check"], events=ALL_EVENTS)
    with process:
        _, problem = process.communicate(timeout=100)
    assert process.returncode == 0, problem
    assert "WARNING: ThreadSanitizer" not in problem
    *paths, last = segment_paths(tape, "nccl_calls")
    paths += [last] if last.read_bytes().startswith(MAGIC) else []
    rows = np.concatenate([read_segment(path).records for path in paths])
    assert len(rows) == 4 * calls
    assert rows["call"].tolist() == list(range(4 * calls))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_call_of_many_threads_and_communicators_is_recorded(
    driver: Path, plugin_library: Path, tmp_path: Path, version: int
) -> None:
    check(driver, plugin_library, tmp_path / "tape", version=version, calls=5000)
    communicators = read_segment(tmp_path / "tape" / "nccl_communicators.00000.tape").records
    assert len(communicators) == 4 * (1 + 5000 // 1000)
    assert (communicators["state"] == COMPLETE).all()


@pytest.fixture(scope="module", params=["thread", "address,undefined"])
def checked(
    plugin_library: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, Path]:
    """The driver and the plugin with a sanitizer in them."""
    flags = [f"-fsanitize={request.param}", "-fno-omit-frame-pointer"]
    folder = tmp_path_factory.mktemp("checked")
    library, driver = folder / "plugin.so", folder / "driver"
    try:
        compile_plugin(library, flags=flags)
        compile_driver(driver, flags)
    except (BuildError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this compiler has no {request.param} sanitizer: {error}")
    return driver, library


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 3, 7])
def test_sanitizers_find_nothing(checked: tuple[Path, Path], tmp_path: Path, version: int) -> None:
    driver, library = checked
    check(driver, library, tmp_path / "tape", version=version, calls=2500)


@pytest.mark.slow
def test_valgrind_finds_nothing(driver: Path, plugin_library: Path, tmp_path: Path) -> None:
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        pytest.skip("no valgrind")
    words = (valgrind, "--quiet", "--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=definite")
    check(driver, plugin_library, tmp_path / "tape", version=5, calls=2200, before=words)


def test_killed_driver_loses_no_finished_call(driver: Path, plugin_library: Path, tmp_path: Path) -> None:
    dice = random.Random(7)
    kills = [
        kill_driver(driver, plugin_library, tmp_path, version=version, after_s=dice.uniform(0, 0.1))
        for version in (4, 5, 6, 7)
    ]
    assert sum(kill.completed for kill in kills) > 0
    assert [kill.lost for kill in kills] == [0] * 4
    assert [kill.gaps for kill in kills] == [0] * 4
    assert all(kill.in_flight <= 4 for kill in kills)


def test_driver_killed_before_its_first_thread_began_lost_nothing(tmp_path: Path) -> None:
    values = {
        "nccl_communicators": {"communicator": 0, "comm_hash": 2},
        "nccl_calls": {"communicator": 0, "nccl_seq": 0},
    }
    for table, known in values.items():
        tape = TapeWriter(tmp_path, TABLES[table], rank=0, attempt=0)
        row = zip(TABLES[table].columns, tape.unset_row(), strict=True)
        tape.append(OPEN, *(known.get(column.name, unset) for column, unset in row))
        tape.close()
    assert _compare(tmp_path, 5, 0) == Kill(version=5, completed=0, lost=0, gaps=0, in_flight=1)


def test_measuring_counts_events(driver: Path, plugin_library: Path, tmp_path: Path) -> None:
    cost = measure(driver, plugin_library, tmp_path, version=5, threads=2, channels=4, calls=100)
    assert cost.num_events == 2 * 100 * (2 + 3 * 4)
    assert cost.call_ns > cost.event_ns > 0
