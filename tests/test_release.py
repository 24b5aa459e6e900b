"""The release workflow: it builds what `make dist` builds, and only its last job may publish."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"


def workflow() -> dict[Any, Any]:
    loaded: dict[Any, Any] = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    return loaded


def commands() -> list[str]:
    return [step["run"] for step in workflow()["jobs"]["build"]["steps"] if "run" in step]


def test_a_tag_starts_it_and_nothing_else_does() -> None:
    assert workflow()[True] == {"push": {"tags": ["v*"]}}, "YAML 1.1 reads `on` as true"


def test_it_builds_and_checks_as_make_does() -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ndist:")[2].partition("\n\n")[0]
    ours = set(re.findall(r"-m ((?:hatchling|twine) .*)", recipe))
    assert len(ours) == 2
    assert {found for one in commands() for found in re.findall(r"-m ((?:hatchling|twine) .*)", one)} == ours


def test_only_the_last_job_may_publish_and_it_runs_no_command() -> None:
    build, publish = (workflow()["jobs"][name] for name in ("build", "publish"))
    assert workflow()["permissions"] == {}
    assert (build["permissions"], publish["permissions"]) == ({"contents": "read"}, {"id-token": "write"})
    assert (publish["needs"], publish["environment"]) == ("build", "pypi")
    assert [set(step) & {"run"} for step in publish["steps"]] == [set()] * len(publish["steps"])
    assert "secrets." not in WORKFLOW.read_text(encoding="utf-8"), "trusted publishing has no token"
    names = [
        step["with"]["name"] for job in (build, publish) for step in job["steps"] if "artifact@" in step.get("uses", "")
    ]
    assert names == ["dist", "dist"]


@pytest.mark.parametrize(("tag", "code"), [("v{}", 0), ("v{}1", 1), ("{}", 1)])
def test_a_tag_that_is_not_the_version_is_refused(tag: str, code: int, tmp_path: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    (command,) = [one for one in commands() if "TAG" in one]
    (tmp_path / "python").symlink_to(sys.executable)
    environment = {"TAG": tag.format(version), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-ec", command], cwd=ROOT, env=environment, timeout=100, check=False)
    assert done.returncode == code
