"""Faults of script drills by name."""

from __future__ import annotations

import pytest

from analyzers.kinds import KINDS
from trainer.drills.script.faults import SCRIPT_FAULTS, chosen_faults


def test_groups_and_names_are_chosen_once() -> None:
    assert "none" not in chosen_faults("all")
    assert chosen_faults("kill,slow,kill")[0] == "kill"
    assert len(chosen_faults("slow,all")) == len(SCRIPT_FAULTS) - 1
    with pytest.raises(ValueError, match="kil: unknown"):
        chosen_faults("kil")


def test_every_fault_asks_for_a_kind_that_exists() -> None:
    assert {kind for fault in SCRIPT_FAULTS.values() for kind in (*fault.kinds, *fault.allowed)} <= KINDS.keys()
