"""Export: whole weights of a sharded checkpoint in one file that another reader understands."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from probes.guard.ledger import LEDGER_NAME, Ledger
from tests.forked import run_python
from tests.processes import run_ranks
from tests.trainer.training_runs import run_loop, small, with_steps
from trainer.checkpoint.disk_tier.manifest import CheckpointError
from trainer.checkpoint.export import export, export_llama, find_checkpoint, proven_step
from trainer.guard.ledger_file import save_ledger
from trainer.layout.resolve import resolve
from trainer.model.llama_names import to_llama
from trainer.training.build import build

ROOT = Path(__file__).parents[3]


def _train(rank: int, world_size: int, folder: Path) -> dict[str, torch.Tensor]:
    parallel = {"dp_shard": 2, "tp": 2}
    return run_loop(with_steps(small(parallel=parallel), 8), folder, rank=rank, world_size=world_size).tensors


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four ranks, fsdp x tp."""
    folder = tmp_path_factory.mktemp("run")
    run_ranks(_train, world_size=4, args=(folder,))
    (folder / "run.json").write_text("{}")
    return folder


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """By the format's own description: eight bytes of length, JSON, then the bytes of all tensors."""
    blob = path.read_bytes()
    size = int.from_bytes(blob[:8], "little")
    header, data = json.loads(blob[8 : 8 + size]), blob[8 + size :]
    about = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        assert entry["dtype"] == "F32"
        start, stop = entry["data_offsets"]
        tensors[name] = np.frombuffer(data[start:stop], dtype="<f4").reshape(entry["shape"])
    return tensors, about


def test_the_file_holds_the_whole_model(run: Path, tmp_path: Path) -> None:
    result = export(find_checkpoint(run, step=None), tmp_path / "model.safetensors")
    tensors, about = _read(tmp_path / "model.safetensors")
    config = with_steps(small(), 10)
    training = build(config, resolve(config, 1), torch.device("cpu"))
    shapes = {name: tuple(parameter.shape) for name, parameter in training.named_parameters()}
    assert {name: value.shape for name, value in tensors.items()} == shapes
    assert about["step"] == "8"
    assert result.num_parameters == sum(value.size for value in tensors.values())
    # The same checkpoint loaded by the trainer on one process, the other way to whole weights.
    loaded: dict[str, torch.Tensor] = {}
    run_loop(
        with_steps(small(), 8), run, rank=0, world_size=1, attempt=1,
        change=lambda session: loaded.update(session.training.named_parameters()),
    )  # fmt: skip
    for name, value in loaded.items():
        assert np.array_equal(value.detach().numpy(), tensors[name]), name


def test_a_damaged_checkpoint_is_not_exported(run: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(run / "checkpoints" / "step-00000008", tmp_path / "step-00000008")
    path = tmp_path / "step-00000008" / "__3_0.distcp"
    blob = bytearray(path.read_bytes())
    blob[-9] ^= 1
    path.write_bytes(blob)
    with pytest.raises(CheckpointError, match=r"__3_0\.distcp does not have the hash"):
        export(tmp_path / "step-00000008", tmp_path / "model.safetensors")
    assert not list(tmp_path.glob("*model.safetensors*"))


def test_a_place_that_cannot_be_written_is_an_os_error(run: Path, tmp_path: Path) -> None:
    checkpoint = find_checkpoint(run, step=None)
    with pytest.raises(FileNotFoundError):
        export(checkpoint, tmp_path / "missing" / "model.safetensors")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        export(checkpoint, tmp_path / "file" / "model.safetensors")


def test_which_checkpoint_is_taken(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no finished checkpoint"):
        find_checkpoint(tmp_path, step=None)
    for step in (4, 8):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    assert find_checkpoint(tmp_path, step=None).name == "step-00000008"
    save_ledger(Ledger(path=tmp_path / "checkpoints" / LEDGER_NAME, good_step=4))
    last = find_checkpoint(tmp_path, step=None)
    assert last.name == "step-00000008", "the last state of a run is what its user wants"
    assert proven_step(last) == 4
    assert proven_step(find_checkpoint(tmp_path, step=4)) is None
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 6\. There are 4, 8"):
        find_checkpoint(tmp_path, step=6)
    (tmp_path / "checkpoints" / "step-00000008").rename(tmp_path / "step-00000008.condemned")
    with pytest.raises(CheckpointError, match="was condemned"):
        find_checkpoint(tmp_path / "step-00000008.condemned", step=None)


def test_the_command(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    command = ["-m", "rankscope", "export", str(run), "--out", str(out)]
    done = run_python(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert f"step {int(find_checkpoint(run, step=None).name[5:])} " in done.stdout
    assert _read(out)[0]
    missing = run_python([*command, "--step", "7"], cwd=ROOT)
    assert missing.returncode == 2
    assert "has no checkpoint of step 7" in missing.stderr
    assert len(missing.stderr.strip().splitlines()) == 1


def test_the_same_run_as_a_llama(run: Path, tmp_path: Path) -> None:
    export(find_checkpoint(run, step=None), tmp_path / "ours.safetensors")
    done = export_llama(find_checkpoint(run, step=None), tmp_path / "llama", small().model)
    ours, _ = _read(tmp_path / "ours.safetensors")
    theirs, _ = _read(tmp_path / "llama" / "model.safetensors")
    assert done.num_tensors == len(ours) == len(theirs)
    for name, value in ours.items():
        assert np.array_equal(theirs[to_llama(name)], value)
    assert json.loads((tmp_path / "llama" / "config.json").read_text())["hidden_size"] == small().model.dim
