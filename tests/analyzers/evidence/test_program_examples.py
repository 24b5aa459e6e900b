"""program_examples.md: each example is recognised as its heading says, and judged as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from store.readers import programs
from store.readers.programs.registry import name_of, program_of
from tests.analyzers.evidence.written import diagnosed

EXAMPLES = Path(__file__).parent / "program_examples.md"
_SECTION = re.compile(r"^### ([^\n]+)\n\n```text\n(.*?)```\n\n([^\n]+)\n", re.MULTILINE | re.DOTALL)
SECTIONS = {
    heading: (example, found) for heading, example, found in _SECTION.findall(EXAMPLES.read_text(encoding="utf-8"))
}
BINARY = {"event file of TensorBoard", "run of W&B (.wandb)"}


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_example_of_a_program_is_read_and_judged_as_stated(tmp_path: Path, heading: str) -> None:
    example, found = SECTIONS[heading]
    program = program_of(example.encode())
    assert program is not None
    assert name_of(program) == heading
    diagnosis = diagnosed(tmp_path, "loss", example)  # MLflow names its files so
    assert any(found in finding.summary for finding in diagnosis.findings), [f.summary for f in diagnosis.findings]


def test_every_reader_of_a_program_has_an_example() -> None:
    modules = [path for path in Path(programs.__path__[0]).glob("*.py") if "\nNAME = " in path.read_text()]
    names = {name_of(path.stem) for path in modules}
    assert names == {*SECTIONS, *BINARY}
