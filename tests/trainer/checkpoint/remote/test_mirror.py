"""The launcher's copies at an address: equal to the disk through faults, and what a machine that lost its disk gets."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from probes.guard.ledger import LEDGER_NAME, Ledger, copy_of
from probes.recorder import NullRecorder
from probes.tape.events import EventWriter, read_events
from probes.tape.rundir import RunDir
from rankscope.commands.export import export
from tests.trainer.checkpoint.remote.test_remote_copies import content, make_checkpoint
from tests.trainer.training_runs import assert_same_bits, run_loop, small, with_steps
from trainer.checkpoint.disk_tier.checkpoints import checkpoint_steps
from trainer.checkpoint.disk_tier.condemned import note_reason
from trainer.checkpoint.remote.address import RemoteError, RemoteFolder
from trainer.checkpoint.remote.copies import RemoteCopies
from trainer.checkpoint.remote.fetched_run import fetched_run
from trainer.checkpoint.remote.mirror import CheckpointMirror
from trainer.checkpoint.starting_over import start_over_if_asked
from trainer.config.config import CheckpointConfig
from trainer.launcher.remote_checkpoints import fetch_run
from trainer.launcher.resume import ResumeError


@dataclasses.dataclass
class Switch:
    """A folder at an address that can be out of reach."""

    is_down: bool = False

    def open(self, address: str) -> RemoteFolder:
        if self.is_down:
            raise RemoteError(f"{address} cannot be read now")
        return RemoteFolder(address, tries=1)


class Machine:
    """A run's folder on one machine, and its mirror."""

    def __init__(self, folder: Path, remote: Path, *, keep: int = 3, resume: bool = True) -> None:
        self.run, is_new = RunDir.adopt(folder / "run")
        if is_new:
            self.run.begin_manifest({})
        node = self.run.node_dir(0)
        node.mkdir(parents=True, exist_ok=True)
        self.log = node / "events.jsonl"
        self.switch = Switch()
        self._config = CheckpointConfig(remote=f"file://{remote}", keep=keep, resume=resume)
        self._events = EventWriter(self.log, attempt=0, rank=-1)
        self.mirror = self.mirror_with(self.switch.open)

    def mirror_with(self, open_folder: Callable[[str], RemoteFolder]) -> CheckpointMirror:
        """A mirror that opens the address in another way."""
        return CheckpointMirror(self.run, self._config, self._events, open_folder=open_folder)

    def save(self, step: int, seed: int = 0) -> Path:
        return make_checkpoint(self.run.checkpoints, step, {"a": content(seed or step, 5000)})

    def events(self) -> list[tuple[str, int | None]]:
        return [(event["state"], event["step"]) for event in read_events(self.log)[0]]

    def close_at_once(self) -> str:
        """Close the mirror without waiting for its last try, then wait until that no longer runs."""
        before = set(threading.enumerate())
        missing = self.mirror.close(limit_s=0.0)
        for last_try in set(threading.enumerate()) - before:
            last_try.join()
        return missing

    def settle(self) -> None:
        """Until nothing changes any more: one checkpoint a pass."""
        for _ in range(8):
            assert self.mirror.sync()


@contextmanager
def refusing(target: Any, function: str, number: int, name: str) -> Iterator[None]:
    """A disk on which this function fails for files whose path ends like this."""
    works = getattr(target, function)

    def fails(path: Path, *arguments: Any, **options: Any) -> Any:
        if Path(path).match(name):
            raise OSError(number, os.strerror(number), str(path))
        return works(path, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, function, fails)
        yield


def steps_at(remote: Path) -> list[int]:
    copies = RemoteCopies(RemoteFolder(f"file://{remote}/run"))
    copies.open()
    return copies.steps


def test_the_newest_is_sent_first_and_removals_here_are_repeated_at_the_address(tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    machine = Machine(tmp_path, remote)
    for step in (10, 20, 30):
        machine.save(step)
    assert machine.mirror.sync()
    assert steps_at(remote) == [30]
    machine.settle()
    assert steps_at(remote) == [10, 20, 30]
    shutil.rmtree(machine.run.checkpoints / "step-00000010")
    poisoned = machine.run.checkpoints / "step-00000030"
    poisoned.rename(poisoned.with_name(poisoned.name + ".condemned"))
    note_reason(poisoned.with_name(poisoned.name + ".condemned"), "it holds a bad update", is_damaged=False)
    machine.settle()
    assert steps_at(remote) == [20]
    assert len(list((remote / "run" / "objects").iterdir())) == 1
    machine.save(30, seed=99)  # reached again, with other values
    machine.settle()
    assert steps_at(remote) == [20, 30]
    assert machine.events().count(("complete", 30)) == 2


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES])
def test_checkpoints_unreadable_here_stay_at_the_address(tmp_path: Path, number: int) -> None:
    remote = tmp_path / "remote"
    machine = Machine(tmp_path, remote)
    for step in (10, 20):
        machine.save(step)
    machine.settle()
    before = machine.events()
    with refusing(Path, "read_bytes", number, "manifest.json"):
        assert not machine.mirror.sync()
        assert not machine.mirror.sync()
        assert steps_at(remote) == [10, 20]
        assert f"cannot be read now ({os.strerror(number)})" in machine.close_at_once()
    assert machine.events() == [*before, ("failed", 20)]
    assert machine.mirror.sync()
    assert steps_at(remote) == [10, 20]
    assert machine.mirror.close() == ""


@pytest.mark.parametrize("name", ["manifest.json", "a"])
def test_a_checkpoint_that_cannot_be_read_now_is_sent_later(tmp_path: Path, name: str) -> None:
    machine = Machine(tmp_path, tmp_path / "remote")
    machine.save(10)
    with refusing(os, "open", errno.EIO, name):
        assert not machine.mirror.sync()
        assert steps_at(tmp_path / "remote") == []
    assert machine.mirror.sync()
    assert steps_at(tmp_path / "remote") == [10]
    assert machine.events() == [("failed", 10), ("complete", 10)]


@pytest.mark.parametrize(
    ("target", "function", "name"),
    [(os, "open", "a"), (os, "open", "manifest.json"), (Path, "read_bytes", "manifest.json")],
)
def test_an_unreadable_checkpoint_delays_no_other_and_pauses_removals(
    tmp_path: Path, target: Any, function: str, name: str
) -> None:
    remote = tmp_path / "remote"
    machine = Machine(tmp_path, remote)
    for step in (10, 20, 30):
        machine.save(step)
    (machine.run.checkpoints / LEDGER_NAME).write_text("{}")
    with refusing(target, function, errno.EIO, f"step-00000030/{name}"):
        assert not machine.mirror.sync()
        assert steps_at(remote) == [20], "the newest that can be read goes first"
        assert not machine.mirror.sync()
        assert steps_at(remote) == [10, 20]
        shutil.rmtree(machine.run.checkpoints / "step-00000010")
        assert not machine.mirror.sync()
    assert steps_at(remote) == [10, 20]
    assert (remote / "run" / "ledger.json").is_file()
    assert machine.events() == [("complete", 20), ("failed", 30), ("complete", 10)], "reported once"
    machine.settle()
    assert steps_at(remote) == [20, 30]


def test_the_files_beside_one_that_cannot_be_read_are_sent_once(tmp_path: Path) -> None:
    machine = Machine(tmp_path, tmp_path / "remote")
    make_checkpoint(machine.run.checkpoints, 10, {"a": content(1, 5000), "b": content(2, 100)})
    with refusing(os, "open", errno.EIO, "b"):
        assert not machine.mirror.sync()
    assert machine.mirror.sync()
    assert read_events(machine.log)[0][-1]["bytes"] < 5000


def test_checkpoints_about_to_be_put_aside_are_not_sent(tmp_path: Path) -> None:
    machine = Machine(tmp_path, tmp_path / "remote")
    machine.save(10)
    machine.run.write_manifest(machine.run.manifest() | {"start_over_at": 1})
    machine.settle()
    assert steps_at(tmp_path / "remote") == []
    assert start_over_if_asked(machine.run, NullRecorder(), resume=True, is_chief=True) == 1
    machine.save(5)
    machine.settle()
    assert steps_at(tmp_path / "remote") == [5]


def test_checkpoints_that_lost_their_manifest_or_folder_here_stay_at_the_address(tmp_path: Path) -> None:
    machine = Machine(tmp_path, tmp_path / "remote", keep=1)
    for step in (10, 20):
        machine.save(step)
    machine.settle()
    (machine.run.checkpoints / "step-00000010" / "manifest.json").unlink()
    machine.settle()
    assert steps_at(tmp_path / "remote") == [10, 20]
    shutil.rmtree(machine.run.checkpoints)  # or it is not mounted
    machine.settle()
    assert steps_at(tmp_path / "remote") == [10, 20]


def test_a_disk_that_cannot_be_read_ends_the_launch_in_one_line(tmp_path: Path) -> None:
    machine = Machine(tmp_path, tmp_path / "remote")
    machine.save(10)
    with (
        refusing(os, "scandir", errno.EIO, "checkpoints"),
        pytest.raises(RemoteError, match=r"checkpoints cannot be read now \(Input/output error\)"),
    ):
        machine.mirror.restore()


def test_an_outage_is_reported_once_and_made_up_for(tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    machine = Machine(tmp_path, remote)
    machine.save(10)
    machine.switch.is_down = True
    assert not machine.mirror.sync()
    assert not machine.mirror.sync()
    assert machine.events() == [("failed", None)]
    assert "step 10 is not at file://" in machine.close_at_once()
    machine.switch.is_down = False
    assert machine.mirror.sync()
    assert steps_at(remote) == [10]
    assert machine.mirror.close() == ""


def test_the_last_checkpoint_is_sent_before_the_run_is_over(tmp_path: Path) -> None:
    machine = Machine(tmp_path, tmp_path / "remote")
    machine.mirror.start()
    machine.save(150)
    assert machine.mirror.close() == ""
    assert steps_at(tmp_path / "remote") == [150]


def test_a_store_that_does_not_answer_delays_neither_saves_nor_the_end(tmp_path: Path) -> None:
    machine = Machine(tmp_path, tmp_path / "remote")
    asked, released = threading.Event(), threading.Event()

    def open_slowly(address: str) -> RemoteFolder:
        asked.set()
        released.wait(60)
        return machine.switch.open(address)

    mirror = machine.mirror_with(open_slowly)
    machine.save(10)
    mirror.start()
    assert asked.wait(60)
    machine.save(20)
    assert "step 20 is not at file://" in mirror.close(limit_s=0.0)
    released.set()
    assert mirror.close() == ""
    assert 20 in steps_at(tmp_path / "remote")


def test_a_launcher_that_was_replaced_sends_and_removes_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, tmp_path / "remote")
    machine.save(10)
    machine.run.write_manifest(machine.run.manifest() | {"launcher_pid": 1})
    assert machine.mirror.sync()
    assert steps_at(tmp_path / "remote") == []


def test_a_machine_that_lost_its_disk_gets_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    first = Machine(tmp_path / "first", remote)
    for step in (10, 20):
        first.save(step)
    (first.run.checkpoints / LEDGER_NAME).write_text('{"a": 1}')
    first.settle()
    whole = {path.name: path.read_bytes() for path in (first.run.checkpoints / "step-00000010").iterdir()}
    newest = json.loads((remote / "run" / "checkpoints" / "step-00000020.json").read_text())
    damaged = remote / "run" / "objects" / newest["files"]["a"]["blake2b"]
    damaged.write_bytes(content(7, 5000))

    second = Machine(tmp_path / "second", remote)
    assert second.mirror.restore() == 10
    assert checkpoint_steps(second.run.checkpoints) == [10]
    assert {p.name: p.read_bytes() for p in (second.run.checkpoints / "step-00000010").iterdir()} == whole
    assert (second.run.checkpoints / LEDGER_NAME).read_text() == '{"a": 1}'
    assert second.events() == [("condemned", 20), ("loaded", 10)]
    assert second.mirror.restore() is None, "it has it now"


def test_a_ledger_that_was_fetched_lacks_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "first", tmp_path / "remote")
    machine.save(10)
    for path in (machine.run.checkpoints / LEDGER_NAME, copy_of(machine.run.checkpoints / LEDGER_NAME)):
        path.write_text(json.dumps(Ledger(skipped={4: "a NaN"}, sequence=3).to_file()))
    machine.settle()
    second = Machine(tmp_path / "second", tmp_path / "remote")
    second.mirror.restore()
    with fetched_run(machine.mirror.address, step=None) as folder:
        for checkpoints in (second.run.checkpoints, folder / "checkpoints"):
            ledger, problem = Ledger.load(checkpoints / LEDGER_NAME)
            assert (ledger.skipped, problem) == ({4: "a NaN"}, "")


def test_where_all_that_is_left_is_damaged_starting_over_must_be_asked_for(tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    first = Machine(tmp_path / "first", remote)
    first.save(10)
    first.settle()
    for path in (remote / "run" / "objects").iterdir():
        path.write_bytes(content(7, 5000))
    for _ in range(2):  # the second launch finds nothing but what was put aside
        with pytest.raises(RemoteError, match=r"no checkpoint can be used.+checkpoint\.resume=false"):
            Machine(tmp_path / "second", remote).mirror.restore()
    assert Machine(tmp_path / "third", remote, resume=False).mirror.restore() is None


def test_without_the_address_a_run_goes_on_only_from_checkpoints_of_its_own(tmp_path: Path) -> None:
    machine = Machine(tmp_path, tmp_path / "remote")
    machine.switch.is_down = True
    with pytest.raises(RemoteError, match="cannot be read now"):
        machine.mirror.restore()
    machine.save(10)
    assert machine.mirror.restore() is None
    assert machine.events() == [("failed", None), ("failed", None)]


def test_a_checkpoint_that_is_damaged_only_here_comes_back_from_there(tmp_path: Path) -> None:
    machine = Machine(tmp_path, tmp_path / "remote")
    for step in (10, 20):
        machine.save(step)
    machine.settle()
    folder = machine.run.checkpoints / "step-00000020"
    condemned = folder.with_name(folder.name + ".condemned")
    folder.rename(condemned)
    note_reason(condemned, "a does not have its hash", is_damaged=True)
    machine.settle()
    assert steps_at(tmp_path / "remote") == [10, 20]
    assert machine.mirror.restore() == 20


def test_training_goes_on_from_an_address_to_the_last_bit(tmp_path: Path) -> None:
    config = with_steps(small(), 24)
    never_lost = run_loop(config, tmp_path / "whole" / "run", rank=0, world_size=1)
    run_loop(with_steps(small(), 16), tmp_path / "first" / "run", rank=0, world_size=1)
    remote = tmp_path / "remote"
    Machine(tmp_path / "first", remote).settle()

    second = Machine(tmp_path / "second", remote)
    assert second.mirror.restore() == 16
    again = run_loop(config, second.run.path, rank=0, world_size=1, attempt=1)
    assert min(again.losses) == 17
    assert_same_bits(again, never_lost, range(17, 25))

    export(second.mirror.address, out=str(tmp_path / "weights.safetensors"))
    assert load_file(tmp_path / "weights.safetensors").keys() == {
        name.removeprefix("model.") for name in never_lost.tensors if name.startswith("model.")
    }


def test_the_folder_of_a_run_is_made_from_its_address(tmp_path: Path) -> None:
    machine = Machine(tmp_path, tmp_path / "remote")
    settings = {"run": {"dir": str(tmp_path / "elsewhere")}}
    machine.run.write_manifest(machine.run.manifest() | {"config": settings, "world_size": 2})
    machine.mirror.restore()
    path = fetch_run(machine.mirror.address)
    assert path == tmp_path / "elsewhere" / "run"
    run = RunDir.open(path)
    assert run.problems() == {}
    assert run.manifest()["world_size"] == 2
    assert run.manifest()["config"]["checkpoint"]["remote"] == f"file://{tmp_path}/remote"
    with pytest.raises(ResumeError, match="has no run"):
        fetch_run(f"file://{tmp_path}/remote/nothing")


def test_a_command_reads_a_checkpoint_at_an_address(tmp_path: Path) -> None:
    machine = Machine(tmp_path, tmp_path / "remote")
    for step in (10, 20):
        machine.save(step)
    machine.mirror.restore()
    machine.settle()
    with fetched_run(machine.mirror.address, step=None) as folder:
        assert checkpoint_steps(folder / "checkpoints") == [20]
        assert RunDir.open(folder).manifest()["run_id"] == "run"
    with fetched_run(machine.mirror.address, step=10) as folder:
        assert checkpoint_steps(folder / "checkpoints") == [10]
    assert not folder.exists()
    with (
        pytest.raises(ValueError, match=r"has no checkpoint of step 15\. There are 10, 20\."),
        fetched_run(machine.mirror.address, step=15),
    ):
        pass
