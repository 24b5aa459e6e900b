"""Public incidents: the right cause in the round that rules were written from, and no wrong culprit anywhere."""

from __future__ import annotations

import pytest

from benchmarks.incidents.score import ROUNDS, Incident, load, score


@pytest.mark.parametrize("incident", load("first"), ids=lambda incident: incident.name)
def test_the_accepted_cause_is_found(incident: Incident) -> None:
    result = score(incident)
    assert result.outcome == "right", result.verdict


@pytest.mark.parametrize("name", ROUNDS)
def test_nobody_is_blamed_wrongly(name: str) -> None:
    results = [score(incident) for incident in load(name)]
    assert [result.verdict for result in results if result.outcome == "wrong culprit"] == []


def test_there_are_sixty_of_different_threads() -> None:
    incidents = [incident for name in ROUNDS for incident in load(name)]
    assert len({incident.link for incident in incidents}) == len(incidents) >= 60
