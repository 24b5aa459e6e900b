"""The recipes of `examples/launch`: shells and container file lint, YAML fits the schemas, and what they call exists.

The models of Kubeflow Trainer's own API (kubeflow-trainer-api) check the TrainJob, and Kubernetes' pod in both.
"""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml
from typer.testing import CliRunner

from rankscope.cli import app
from trainer.config.load import load_config

LAUNCH = Path(__file__).parent.parent / "examples" / "launch"
CONTAINERFILE = LAUNCH / "Containerfile"
SHELLS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])
POD_FILES = ("kubeflow-trainjob.yaml", "kubeflow-pytorchjob.yaml")


def document(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((LAUNCH / name).read_text())
    return loaded


def pods() -> dict[str, dict[str, Any]]:
    """{file and role: template of the pod} as written; the TrainJob's container is the trainer with its patch."""
    replicas = document("kubeflow-pytorchjob.yaml")["spec"]["pytorchReplicaSpecs"]
    return {role: specification["template"] for role, specification in replicas.items()}


def jobset_pod() -> dict[str, Any]:
    """Template of the JobSet's pods."""
    (replicated,) = document("jobset.yaml")["spec"]["replicatedJobs"]
    template: dict[str, Any] = replicated["template"]["spec"]["template"]
    return template


def programs() -> dict[str, str]:
    """Every shell program of the recipes, those inside the YAML too."""
    found = {path.name: path.read_text() for path in SHELLS}
    found["trainjob"] = "#!/bin/bash\n" + document("kubeflow-trainjob.yaml")["spec"]["trainer"]["args"][0]
    found["jobset"] = "#!/bin/bash\n" + jobset_pod()["spec"]["containers"][0]["args"][0]
    found["compose"] = "#!/bin/bash\n" + document("compose.yaml")["services"]["train"]["command"][0].replace("$$", "$")
    found["skypilot"] = "#!/bin/bash\n" + document("skypilot.yaml")["run"]
    return found | {
        role: "#!/bin/bash\n" + template["spec"]["containers"][0]["args"][0] for role, template in pods().items()
    }


def read_as(model: str, document: dict[str, Any]) -> Any:
    from kubeflow_trainer_api import models  # four hundred modules

    return getattr(models, model).from_dict(document).to_dict()


def unknown(document: Any, understood: Any, place: str = "") -> list[str]:
    """Paths of a document that a model has not read back; defaults that the model adds are ignored."""
    if isinstance(document, dict):
        if not isinstance(understood, dict):
            return [place]
        return [
            missing
            for key, value in document.items()
            for missing in (
                unknown(value, understood[key], f"{place}.{key}") if key in understood else [f"{place}.{key}"]
            )
        ]
    if isinstance(document, list) and isinstance(understood, list) and len(document) == len(understood):
        return [m for i, value in enumerate(document) for m in unknown(value, understood[i], f"{place}[{i}]")]
    return [] if document == understood else [place]


@pytest.mark.parametrize("name", list(programs()))
def test_shells_parse_and_lint(name: str) -> None:
    shellcheck = str(Path(sys.executable).with_name("shellcheck"))  # of the environment, on the path or not
    for command in (["bash", "-n"], [shellcheck, "--shell=bash", "-"]):
        done = subprocess.run(command, input=programs()[name], capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", list(programs()))
def test_commands_options_and_settings_exist(name: str) -> None:
    """Options in arrays (`where=(--nnodes ...)`) count too: none is left to a cluster to refuse."""
    text = re.sub(r"^\s*#.*$", "", programs()[name], flags=re.MULTILINE)
    if name == "torchrun-two-nodes.sh":
        text = text.partition("exec torchrun")[0]  # the rest is torchrun's
    runner = CliRunner()
    commands = set(re.findall(r"rankscope (train|doctor)\b", text))
    assert commands
    helped = "".join(
        runner.invoke(app, [command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output for command in commands
    )
    of_srun = {"--nodes", "--ntasks", "--overlap", "--kill-on-bad-exit"}
    asked = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - of_srun
    assert {option for option in asked if option not in helped} == set()
    for setting in set(re.findall(r"--set \"?([a-z_.]+)=", text)):
        value = "127.0.0.1:9400" if setting == "metrics.listen" else "x"
        load_config(None, [f"{setting}={value}"])


def test_the_trainjob_is_valid() -> None:
    job = document("kubeflow-trainjob.yaml")
    assert unknown(job, read_as("TrainerV1alpha1TrainJob", job)) == []


def test_the_jobset_is_valid() -> None:
    job = document("jobset.yaml")
    assert unknown(job, read_as("JobsetV1alpha2JobSet", job)) == []
    assert (
        jobset_pod()["metadata"]["labels"].items()
        >= document("podmonitor.yaml")["spec"]["selector"]["matchLabels"].items()
    )


def test_the_compose_file_is_valid() -> None:
    from compose_spec import ComposeSpecification

    composed = ComposeSpecification.model_validate(document("compose.yaml"))
    assert composed.services is not None
    assert set(composed.services.root if hasattr(composed.services, "root") else composed.services) == {
        "train",
        "dashboard",
    }
    with pytest.raises(ValueError, match="volumes"):
        ComposeSpecification.model_validate({"services": {"train": {"volumes": 3}}})


@pytest.mark.parametrize("name", ["trainjob", "Master", "jobset", "compose", "skypilot"])
def test_each_job_has_a_folder_of_its_name(name: str, tmp_path: Path) -> None:
    """The program run for real, with a `rankscope` that writes what it got: a second job does not see the first one's
    run, and the first one goes on with its own."""
    (tmp_path / "bin").mkdir()
    stub = tmp_path / "bin" / "rankscope"
    stub.write_text(f'#!/bin/bash\nprintf "%s\\n" "$*" >>{shlex.quote(str(tmp_path / "calls"))}\n')
    stub.chmod(0o755)
    program = programs()[name].replace("/runs/", f"{tmp_path}/runs/")
    # What each system sets for a node.
    known = {
        "PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "a", "WORLD_SIZE": "2", "RANK": "0",
        "MASTER_ADDR": "a", "JOB_COMPLETION_INDEX": "0", "SKYPILOT_NODE_IPS": "a\nb", "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    }  # fmt: skip

    def start(job: str) -> str:
        environment = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "JOB": job, **known}
        subprocess.run(["bash", "-euc", program], env=environment, check=True, timeout=60)
        return (tmp_path / "calls").read_text().splitlines()[-1]

    assert f"--set run.dir={tmp_path}/runs/one" in start("one")
    (tmp_path / "runs" / "one" / "latest").mkdir()
    assert f"--set run.dir={tmp_path}/runs/two" in start("two")
    assert f"--resume {tmp_path}/runs/one/latest" in start("one")


def test_ray_starts_a_launcher_on_each_node() -> None:
    """Ray is not installed here: that the script is Python, and that each option of its command exists."""
    text = (LAUNCH / "ray_job.py").read_text()
    compile(text, "ray_job.py", "exec")
    helped = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    assert {
        one for one in re.findall(r'\["(--[a-z-]+)"|"(--n[a-z-]+|--rdzv-endpoint)"', text) if one[0] not in helped
    } == set()
    started = [node.args[0] for node in ast.walk(ast.parse(text))
               if isinstance(node, ast.Call) and ast.unparse(node.func) == "subprocess.run"]  # fmt: skip
    assert [ast.unparse(words)[:39] for words in started] == ["[sys.executable, '-m', 'rankscope', 'tr"], (
        "workers of Ray have the PATH of `ray start`, not that of the environment that runs the script"
    )


@pytest.mark.parametrize(("codes", "code"), [([0, 0], 0), ([0, 6], 6), ([0, -9], -9)])
def test_a_ray_job_fails_with_a_launcher_that_was_killed(
    codes: list[int], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = MagicMock()
    ray.get.side_effect = [None, "node-0", codes]
    for name in ("ray", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, ray)
    monkeypatch.setattr(sys, "argv", ["ray_job.py", "train.toml", "--job", "gpt-1"])
    assert runpy.run_path(str(LAUNCH / "ray_job.py"))["main"]() == code


@pytest.mark.parametrize("role", ["Master", "Worker"])
def test_the_pytorchjob_has_pods(role: str) -> None:
    job, template = document("kubeflow-pytorchjob.yaml"), pods()[role]
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert unknown(template, read_as("IoK8sApiCoreV1PodTemplateSpec", template)) == []
    (container,) = template["spec"]["containers"]
    assert container["name"] == "pytorch", "the operator looks for this name"


@pytest.fixture(scope="module")
def hadolint() -> str:
    found = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:  # its wheels are for Linux and macOS on two processors
        pytest.skip("no hadolint for this platform")
    return found


def test_the_container_file_lints(hadolint: str) -> None:
    done = subprocess.run([hadolint, str(CONTAINERFILE)], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_a_mistake_in_the_container_file_is_found(hadolint: str) -> None:
    text = CONTAINERFILE.read_text().replace("--no-cache-dir ", "").replace("USER 10001:10001", "USER root")
    done = subprocess.run([hadolint, "-"], input=text, capture_output=True, text=True, timeout=100, check=False)
    assert {"DL3042", "DL3002"} <= set(re.findall(r"DL\d+", done.stdout)), done.stdout


def test_the_image_is_that_of_the_manifests_and_its_user_is_not_root() -> None:
    text = CONTAINERFILE.read_text()
    project = tomllib.loads((LAUNCH.parent.parent / "pyproject.toml").read_text())["project"]
    (tag,) = re.findall(r"--tag (\S+)", text)
    assert tag.endswith(f":{project['version']}")
    trainjob = document("kubeflow-trainjob.yaml")["spec"]
    images = {template["spec"]["containers"][0]["image"] for template in pods().values()}
    assert images | {trainjob["trainer"]["image"]} == {tag}
    (user,) = re.findall(r"^USER (\d+):\1$", text, re.MULTILINE)
    replicated = trainjob["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    specs = [replicated["template"]["spec"]["template"]["spec"], *(template["spec"] for template in pods().values())]
    for spec in specs:
        context = spec["securityContext"]
        assert (context["runAsNonRoot"], str(context["runAsUser"]), str(context["fsGroup"])) == (True, user, user)
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)", text, re.MULTILINE)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert "train" in extras.split(",")
    assert "HEALTHCHECK" not in re.sub(r"^#.*", "", text, flags=re.MULTILINE)


def test_a_mistake_in_a_pod_is_found() -> None:
    template = {"spec": {"containers": [{"name": "pytorch", "volumeMount": []}]}}
    understood = read_as("IoK8sApiCoreV1PodTemplateSpec", template)
    assert unknown(template, understood) == [".spec.containers[0].volumeMount"]


def test_the_podmonitor_finds_the_pods_and_their_secret() -> None:
    monitor = document("podmonitor.yaml")["spec"]
    wanted = monitor["selector"]["matchLabels"]
    assert all(template["metadata"]["labels"].items() >= wanted.items() for template in pods().values())
    node = document("kubeflow-trainjob.yaml")["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    patched = node["replicatedJobs"][0]["template"]["spec"]["template"]
    assert patched["metadata"]["labels"].items() >= wanted.items()
    (endpoint,) = monitor["podMetricsEndpoints"]
    for name in POD_FILES:
        text = (LAUNCH / name).read_text()
        assert f"metrics.listen=0.0.0.0:{endpoint['portNumber']}" in text
        assert f"secretName: {endpoint['authorization']['credentials']['name']}" in text


def test_slurm_tells_each_node_its_number(tmp_path: Path) -> None:
    """The recipe run for real with an `srun` that starts two tasks here, and a `rankscope` that writes what it got."""
    programs = {
        "scontrol": f'echo node-a; echo node-b; echo "$*" >>{shlex.quote(str(tmp_path / "asked"))}',
        "srun": 'while [ "${1#--}" != "$1" ]; do case $1 in --nodes|--ntasks) one=1; shift 2;; *) shift;; esac; done\n'
        'SLURM_NODEID=0 "$@"; [ -n "${one:-}" ] || SLURM_NODEID=1 "$@"',
        "rankscope": f'printf "%s\\n" "$*" >>{shlex.quote(str(tmp_path / "calls"))}\n'
        '[ "$1" = doctor ] || exit "${CODE:-0}"',
    }
    for name, text in programs.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "70123",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
    }
    command = ["bash", str(LAUNCH / "slurm.sbatch"), "my.toml", "--set", "run.name=a b"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=100)
    same = "--nnodes 2 --nproc-per-node 4 --rdzv-endpoint node-a:29623 --set run.name=a b --node-rank"
    assert (tmp_path / "calls").read_text().splitlines() == [
        "doctor --runs runs/70123",
        f"train my.toml --set run.dir=runs/70123 {same} 0",
        f"train my.toml --set run.dir=runs/70123 {same} 1",
    ]
    assert "requeue" not in (tmp_path / "asked").read_text()
    (tmp_path / "runs" / "70123" / "latest").mkdir(parents=True)
    stopped = subprocess.run(command, cwd=tmp_path, env=environment | {"CODE": "143"}, check=False, timeout=100)
    assert f"train --resume runs/70123/latest {same} 1" in (tmp_path / "calls").read_text()
    assert stopped.returncode == 143
    assert "requeue 70123" in (tmp_path / "asked").read_text().splitlines()
