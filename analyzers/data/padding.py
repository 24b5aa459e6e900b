"""Share of padding in the batches of a loop that the probes are attached to.

    findings = padding(source, Scope())         # kind `padding`

The probes count the positions that an attention mask of 0 and 1 leaves out, as scalars `padded_tokens` of each rank and
step. A loop without such a mask has none, and is not judged.
"""

from __future__ import annotations

from analyzers.data.policy import DataPolicy
from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.run.snapshot import attempts
from analyzers.scope import Scope
from analyzers.source import Source, lacking

__all__ = ["padding"]


def padding(source: Source, scope: Scope, policy: DataPolicy | None = None) -> list[Finding]:
    """Report at most one finding per attempt."""
    policy = policy or DataPolicy()
    if lacking(source, steps=("tokens",), scalars=("name", "value")):
        return []
    findings = []
    for attempt in attempts(source):
        if scope.attempt not in (None, attempt):
            continue
        ((first, last, steps, tokens, padded),) = source.rows(
            """
            SELECT min(step), max(step), count(DISTINCT step), sum(tokens), sum(value)
            FROM steps LEFT JOIN (FROM scalars WHERE name = 'padded_tokens') USING (attempt, rank, step)
            WHERE attempt = ? AND step >= ? AND tokens > 0
            """,
            [attempt, scope.since_step or 0],
        )
        if steps < policy.min_steps or padded is None or padded < SHARED.severe_share_ratio * tokens:
            continue
        share = padded / tokens
        findings.append(
            Finding(
                analyzer="padding",
                kind="padding",
                severity="warning",
                status="fired",
                first_step=first,
                last_step=last,
                cause="",
                summary=f"{100 * share:.0f} % of the tokens in steps {first} to {last} are padding.",
                evidence={"padded_ratio": round(share, 4), "padded_tokens": int(padded), "tokens": int(tokens)},
                advice="padding",
                attempt=attempt,
            )
        )
    return findings
