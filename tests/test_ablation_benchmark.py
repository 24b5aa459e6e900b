"""The comparison of verdicts before and after a change of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.accuracy.ablation import main

FAILED = "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"


def test_a_verdict_that_an_interrupted_call_left_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "cases" / "one" / "job.log"
    log.parent.mkdir(parents=True)
    log.write_text(FAILED)
    before, after = (str(tmp_path / name) for name in ("before.json", "after.json"))
    assert main(["verdicts", str(tmp_path / "cases"), "--json", before]) == 0
    log.write_text("step 1 loss 2.0\n")
    for _ in range(2):  # the second call finds the result of the first
        assert main(["verdicts", str(tmp_path / "cases"), "--json", after, "--against", before]) == 1
        assert "1 cases, 1 with another verdict\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["verdicts", str(tmp_path / "cases"), "--json", before, "--against", before])
