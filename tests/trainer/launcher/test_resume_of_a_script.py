"""`train --resume` of a run that another training loop recorded: refused, nothing is trained into its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from probes.tape.rundir import RunDir
from trainer.launcher.resume import ResumeError, prepare


@pytest.mark.parametrize("force", [False, True])
def test_a_run_of_a_script_is_not_resumed_by_the_trainer(tmp_path: Path, force: bool) -> None:
    manifest = {"config": {"recovery": {"enabled": False}}, "attached": True, "command": ["train.py", "--lr", "1"]}
    run = RunDir.create(tmp_path, name="script", manifest=manifest)
    with pytest.raises(ResumeError, match=r"not recorded by `rankscope train`. Start train.py --lr 1 again") as refused:
        prepare(run.path, [], force=force)
    assert "\n" not in str(refused.value)
