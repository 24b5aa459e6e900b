"""What a check lacks is said in words, with what records it; names of columns stay in the evidence."""

from __future__ import annotations

import re

from analyzers.run.records.not_recorded import missing, not_recorded
from probes.tape.format import schema


def test_a_missing_input_names_the_setting_that_records_it() -> None:
    assert not_recorded(["steps.forward_ns"]) == "forward times were not recorded (to record them: `recorder.phase`)"
    assert (
        not_recorded(["health"])
        == "readings of GPUs and hosts were not recorded (to record them: `probes.health = true`)"
    )
    assert not_recorded(["events"]) == "events of the run were not recorded"
    assert not_recorded(["steps", "collectives"]) == "steps and collective calls were not recorded"
    assert missing(["steps.loss"]) == {"missing_records": ["steps.loss"]}


def test_no_summary_contains_the_name_of_a_table_or_column() -> None:
    for table, columns in ((table.name, [column.name for column in table.columns]) for table in schema.TABLES.values()):
        for absent in [table, *(f"{table}.{column}" for column in columns)]:
            words = not_recorded([absent])
            assert not re.search(r"_|\.\w", re.sub(r"`[^`]*`", "", words)), words
