"""CSV tables that count epochs and no steps: Keras' CSVLogger, Ultralytics' results.csv, home-made ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from store.readers.programs.metrics_table import read, recognise
from store.readers.untrusted.external_files import SourceError
from tests.analyzers.evidence.written import diagnosed


def steps_of(folder: Path, text: str) -> list[tuple[int, float | None]]:
    path = folder / "results.csv"
    path.write_text(text, encoding="utf-8")
    assert recognise(path.read_bytes())
    return [(row["step"], row["loss"]) for row in read(path).steps]


def test_an_epoch_counts_as_a_step(tmp_path: Path) -> None:
    assert steps_of(tmp_path, "epoch,accuracy,loss,val_loss\n0,0.5,2.0,3\n1,0.6,1.5,3\n") == [(0, 2.0), (1, 1.5)]
    text = "epoch,accuracy,loss,val_loss\n" + "".join(f"{n},0.5,{2 if n < 17 else 'nan'},3\n" for n in range(20))
    (found,) = diagnosed(tmp_path, "training.log", text).fired
    assert "The loss is not finite from step 17 on" in found.summary


@pytest.mark.parametrize("epochs", [("0", "0", "1", "1"), ("0.25", "0.5", "0.75", "1.0"), ("1", "2", "1", "2")])
def test_each_of_several_rows_per_epoch_is_a_step(tmp_path: Path, epochs: Sequence[str]) -> None:
    text = "epoch,loss\n" + "".join(f"{epoch},{loss}\n" for epoch, loss in zip(epochs, "4321", strict=True))
    assert steps_of(tmp_path, text) == [(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)]


def test_the_parts_of_ultralytics_loss_are_added(tmp_path: Path) -> None:
    text = "      epoch,  train/box_loss,  train/cls_loss,  val/box_loss,  lr/pg0\n"
    rows = "          1,             1.5,             2.0,           9.0,    0.01\n"
    bad = "          2,             1.5,             nan,           9.0,    0.01\n"
    first, second = steps_of(tmp_path, text + rows + bad)
    assert first == (1, 3.5)
    assert (second[0], str(second[1])) == (2, "nan")


def test_tables_of_epochs_without_a_training_loss_are_refused(tmp_path: Path) -> None:
    for text in ("epoch,lr\n1,0.1\n", "epoch,val_loss\n1,2.0\n", "epoch,accuracy\n1,0.5\n"):
        assert not recognise(text.encode())
    with pytest.raises(SourceError, match=r"CSV table \(epoch, top1\)"):
        diagnosed(tmp_path, "a.csv", "epoch,   top1\n1,0.1\n2,0.2\n")
