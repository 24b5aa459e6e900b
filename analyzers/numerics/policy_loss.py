"""Attempts that train a policy: their steps act in an environment, or generate completions and score them.

    attempts = policy_attempts(source)

The loss of PPO, GRPO and similar methods is a surrogate: near 0, of either sign, and scaled differently for each batch
of completions. The loss of a value function follows the rewards that the policy receives and a bootstrapped target.
Neither measures progress, so a jump or climb means nothing. The same holds for models that are trained in turn against
each other: a discriminator's loss rises because the generator has learned.
"""

from __future__ import annotations

from analyzers.source import Source
from probes.tape import event_kinds

__all__ = ["policy_attempts"]

GENERATES = ("generation", "generate", "gen", "rollout", "rollouts", "sampling")
SCORES = (
    "reward", "rewards", "score", "scoring", "advantage", "advantages", "adv", "log_probs", "old_log_prob",
    "old_log_probs", "ref_log_prob", "ref_log_probs",
)  # fmt: skip
"""Names of phases in which a loop generates and scores completions, as `probes.attach.loop.trl_phases`, TRL, verl and
other loops name them.
"""
ACTS = "environment"
"""Phase in which a loop acts in an environment (`probes.attach.loop.environment_phases`)."""


def policy_attempts(source: Source) -> set[int]:
    """Attempts in which steps generate and score, or act in an environment, or which train several models in turn."""
    rows = []
    if source.has("events"):
        rows = source.rows("SELECT attempt FROM events WHERE kind = ?", [event_kinds.TRAINED_IN_TURN])
    if not source.has("spans"):
        return {attempt for (attempt,) in rows}
    rows += source.rows(
        "SELECT attempt FROM spans WHERE list_contains(?, kind) GROUP BY attempt "
        "HAVING bool_or(list_contains(?, kind)) AND bool_or(list_contains(?, kind)) OR bool_or(kind = ?)",
        [[*GENERATES, *SCORES, ACTS], list(GENERATES), list(SCORES), ACTS],
    )
    return {attempt for (attempt,) in rows}
