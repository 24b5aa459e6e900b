"""Public incidents: the right cause in the round that rules were written from, and no wrong culprit anywhere."""

from __future__ import annotations

import pytest

from benchmarks.incidents.score import ROUNDS, Incident, Result, load, score

OPEN = {"second": ["all-gather-at-the-end-of-training"]}
"""Incidents of each round whose cause is not found."""
_SCORED: dict[tuple[str, str], Result] = {}


def scored(incident: Incident) -> Result:
    """Its score, computed once."""
    key = (incident.round, incident.name)
    if key not in _SCORED:
        _SCORED[key] = score(incident)
    return _SCORED[key]


@pytest.mark.parametrize("incident", load("first"), ids=lambda incident: incident.name)
def test_the_accepted_cause_is_found(incident: Incident) -> None:
    result = scored(incident)
    assert result.outcome == "right", result.verdict


@pytest.mark.parametrize("name", ROUNDS)
def test_nobody_is_blamed_wrongly(name: str) -> None:
    results = [scored(incident) for incident in load(name)]
    assert [result.verdict for result in results if result.outcome == "wrong culprit"] == []
    assert [result.incident.name for result in results if result.outcome != "right"] == OPEN.get(name, [])


def test_there_are_sixty_of_different_threads() -> None:
    incidents = [incident for name in ROUNDS for incident in load(name)]
    assert len({incident.link for incident in incidents}) == len(incidents) >= 60
