"""The project's files are consistent."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
OURS = (
    "dev", "train", "fp8", "dashboard", "otel", "stacks", "trackers", "lake", "remote", "mcp", "hf", "lightning",
    "docs",
)  # fmt: skip
# What `make` installs: the frameworks too, whose examples the tests run.
INSTALLED = [*PROJECT["dependencies"], *(line for extra in OURS for line in EXTRAS[extra])]


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


@pytest.mark.parametrize("declared", INSTALLED)
def test_every_dependency_is_pinned_within_its_range(declared: str) -> None:
    requirement = Requirement(declared)
    pinned = constraints().get(canonicalize_name(requirement.name))
    assert pinned is not None, f"{requirement.name} is not in constraints.txt"
    assert requirement.specifier.contains(pinned), f"{pinned} is outside {declared}"


def test_make_installs_the_extras_that_are_ours() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    asked = re.search(r"\.checks:.*?--editable '\.\[([a-z0-9,]+)\]'", makefile, re.DOTALL)
    assert asked is not None
    assert set(asked[1].split(",")) == set(OURS)


def test_what_cites_a_version_names_this_one() -> None:
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited is not None
    assert cited[1] == PROJECT["version"]


def test_constraints_name_no_build_of_one_machine() -> None:
    assert not [name for name, version in constraints().items() if "+" in version]


def test_ci_calls_exactly_make_test() -> None:
    last_line = (ROOT / ".ci" / "run").read_text(encoding="utf-8").rstrip().splitlines()[-1]
    assert last_line == "exec make test </dev/null"


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_help_has_a_line_for_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)
    assert phony is not None
    done = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=100
    )
    assert [line.split()[1] for line in done.stdout.splitlines()] == phony[1].split()
