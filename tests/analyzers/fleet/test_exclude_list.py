"""The list of suspicious hosts that a user pastes into a command."""

from __future__ import annotations

import json

from analyzers.fleet.exclude_list import exclude_list
from analyzers.fleet.fleet import Fleet, Member
from analyzers.fleet.rates import Rate


def _host(name: str) -> Member:
    rate = Rate(mean_per_h=1.0, low_per_h=0.5, high_per_h=2.0)
    return Member(
        name=name, host=name, runs=9, hours=90.0, bad_runs=9, kinds={"hang": 9}, cost_s=0.0, rate=rate, chance=1e-9,
        is_suspicious=True,
    )  # fmt: skip


def _fleet(*names: str) -> Fleet:
    return Fleet(num_runs=9, hours=90.0, restarts=0, failures=9, hosts=tuple(map(_host, names)), devices=())


def test_the_suspicious_hosts_in_each_form() -> None:
    found = _fleet("gpu-12.cluster", "gpu-07")
    assert exclude_list(found, "slurm") == "--exclude=gpu-07,gpu-12.cluster"
    terms = json.loads(exclude_list(found, "kubernetes"))["affinity"]["nodeAffinity"]
    (term,) = terms["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"][0]["values"] == ["gpu-07", "gpu-12.cluster"]


def test_a_name_that_is_no_host_name_adds_no_option_to_a_command() -> None:
    """`sbatch $(rankscope fleet runs/ --exclude slurm)` splits the output at spaces; a run may record any name."""
    bad = ("a --wrap=evil", "-n1", "$(evil)", "a;b", "a\n--wrap=evil", "")
    assert exclude_list(_fleet("gpu-07", *bad), "slurm") == "--exclude=gpu-07"
    assert exclude_list(_fleet(*bad), "kubernetes") == ""
