"""The defects of `benchmarks.accuracy.mutations` still fit the code; that command checks whether tests find them."""

from __future__ import annotations

import ast

import pytest

from benchmarks.accuracy.mutations import MUTATIONS, ROOT, Mutation, occurrences


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_a_defect_applies(mutation: Mutation) -> None:
    assert occurrences(mutation) == 1, "the code has moved: give the defect its new text"
    text = (ROOT / mutation.file).read_text(encoding="utf-8").replace(mutation.old, mutation.new)
    ast.parse(text)
    for name in mutation.tests.split():
        path, _, function = name.partition("[")[0].partition("::")
        assert f"def {function}" in (ROOT / path).read_text(encoding="utf-8"), "the test was renamed"


def test_there_are_thirty_over_all_packages() -> None:
    assert len(MUTATIONS) >= 30
    packages = {mutation.file.partition("/")[0] for mutation in MUTATIONS}
    assert packages == {"probes", "store", "analyzers", "watch", "trainer", "dashboard", "rankscope"}
