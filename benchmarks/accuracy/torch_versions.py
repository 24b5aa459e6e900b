"""Try versions of torch: one environment per version, and trials with two ranks on CPUs over gloo.

    python -m benchmarks.accuracy.torch_versions 2.11.0 2.15.0 --folder ENVIRONMENTS --json versions.json
    python -m benchmarks.accuracy.torch_versions 2.6.0 --only "attach ddp" "attach fsdp2" --folder ENVIRONMENTS

An environment holds torch and the libraries that its import loads (a CUDA build: 3 GB); all other packages come from
the environment that runs this. An existing environment is reused. Each trial is a separate launch, judged by `rankscope
analyze`: it passes if it trained to its end, has the expected finding, and has no other critical finding.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness import argument_parser, markdown_head, markdown_row, write_json

__all__ = ["TRIALS", "Outcome", "Trial", "libraries", "make_environment", "markdown", "run_trial"]

ROOT = Path(__file__).parents[2]
NOT_IMPORTED = ("triton", "cuda-bindings", "nvidia-cusolver", "nvidia-nvtx")
"""Requirements of CUDA builds that are not loaded by torch's import."""
TIMEOUT_S = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    arguments: tuple[str, ...]
    """Arguments of `python -m rankscope`."""
    findings: frozenset[str] = frozenset()
    """Kinds that have to be found; no other finding may be critical."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    version: str
    trial: str
    passed: bool
    seconds: float
    what: str
    """Last line of the error; empty if the trial passed."""


def _train(*settings: str, faults: Sequence[str] = ()) -> tuple[str, ...]:
    chosen = (
        "model.dim=32", "model.num_layers=2", "model.num_heads=4", "data.seq_len=32", "train.steps=16",
        "train.global_batch_size=8", "checkpoint.interval=8", "checkpoint.memory_interval=4", *settings,
    )  # fmt: skip
    return ("train", "debug", "--nproc-per-node", "2", *(f"--set={each}" for each in chosen),
            *(f"--fault={each}" for each in faults))  # fmt: skip


TRIALS: Mapping[str, Trial] = {
    "ddp": Trial(arguments=_train("parallel.dp_replicate=2", "parallel.dp_shard=1")),
    "fsdp2": Trial(arguments=_train("parallel.dp_shard=2")),
    "tp": Trial(arguments=_train("parallel.tp=2", "parallel.dp_shard=1")),
    "pp": Trial(arguments=_train("parallel.pp=2", "parallel.dp_shard=1")),
    "rollback": Trial(
        arguments=_train("parallel.dp_shard=2", faults=["nan_grad@step=10,rank=1"]), findings=frozenset({"non_finite"})
    ),
    "hang": Trial(
        arguments=_train("parallel.dp_shard=2", faults=["hang@step=10,rank=1"]), findings=frozenset({"hang"})
    ),
    "attach ddp": Trial(arguments=("run", "--nproc-per-node", "2", str(ROOT / "examples/attach/ddp.py"))),
    "attach fsdp2": Trial(arguments=("run", "--nproc-per-node", "2", str(ROOT / "examples/attach/fsdp2.py"))),
}


def libraries(metadata: str) -> list[str]:
    """Requirements of a build of torch that its import loads, from its METADATA; empty for a build without CUDA."""
    found = []
    for line in metadata.splitlines():
        name, _, value = line.partition(":")
        requirement, _, marker = value.partition(";")
        requirement = requirement.strip()
        if name != "Requires-Dist" or "extra" in marker or requirement.startswith(NOT_IMPORTED):
            continue
        if requirement.startswith(("nvidia-", "cuda-toolkit")):
            found.append(re.sub(r"\b(cusolver|nvtx),|,(cusolver|nvtx)\b", "", requirement))
    return found


def make_environment(folder: Path, version: str) -> Path:
    """Python of an environment with this torch and the packages of this one. Raises CalledProcessError."""
    python = folder / version / "bin" / "python"
    paths = sysconfig.get_paths(vars={"base": str(folder / version), "platbase": str(folder / version)})
    packages = Path(paths["purelib"])
    others = packages / "zz_others.pth"
    if others.exists():
        return python
    venv.create(folder / version, with_pip=True, clear=True)
    install = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, "--no-deps", f"torch=={version}"], check=True)
    (metadata,) = packages.glob("torch-*.dist-info/METADATA")
    if needed := libraries(metadata.read_text(encoding="utf-8")):
        subprocess.run([*install, *needed], check=True)
    # After the environment's packages, so that its torch is found first.
    lines = [f"import site; site.addsitedir({path!r})" for path in _package_folders()]
    others.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return python


def _package_folders() -> list[str]:
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


def run_trial(python: Path, version: str, name: str, folder: Path) -> Outcome:
    """Run one trial in `folder`, which keeps its log."""
    folder.mkdir(parents=True, exist_ok=True)
    trial, log = TRIALS[name], folder / "log.txt"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    begin = time.monotonic()
    with log.open("w") as output:
        try:
            code = subprocess.run(
                [python, "-m", "rankscope", *trial.arguments],
                cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=TIMEOUT_S, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = -1
    seconds = time.monotonic() - begin
    what = f"did not end within {TIMEOUT_S} s" if code == -1 else _mistake(python, folder, environment, trial, code)
    return Outcome(version=version, trial=name, passed=not what, seconds=round(seconds, 1), what=what)


def _mistake(python: Path, folder: Path, environment: Mapping[str, str], trial: Trial, code: int) -> str:
    if code:
        lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"exit code {code}: {lines[-1] if lines else ''}"
    done = subprocess.run(
        [python, "-m", "rankscope", "analyze", "runs/latest", "--format", "json"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    try:
        report = json.loads(done.stdout)
    except ValueError:
        return f"no report: {done.stderr.strip()[-200:]}"
    (folder / "report.json").write_text(done.stdout, encoding="utf-8")
    kinds = {str(each["kind"]) for each in report["findings"] if each["severity"] != "info"}
    critical = {str(each["kind"]) for each in report["findings"] if each["severity"] == "critical"}
    if not trial.findings <= kinds or critical - trial.findings:
        return f"findings {sorted(kinds)} instead of {sorted(trial.findings)}"
    return ""


def markdown(outcomes: Sequence[Outcome]) -> str:
    """One row per version, one column per trial."""
    names = [name for name in TRIALS if any(each.trial == name for each in outcomes)]
    by_cell = {(each.version, each.trial): each for each in outcomes}
    rows = [markdown_head("torch", *names)]
    for version in dict.fromkeys(each.version for each in outcomes):
        row = [by_cell.get((version, name)) for name in names]
        cells = ["-" if each is None else f"{each.seconds:.0f} s" if each.passed else each.what for each in row]
        rows.append(markdown_row(version, *cells))
    return "\n".join(rows)


def main() -> None:
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("versions", nargs="+", help="e.g. 2.11.0; `here`: the version in this environment")
    parser.add_argument("--folder", type=Path, required=True, help="folder for environments and runs")
    parser.add_argument("--only", nargs="+", choices=list(TRIALS), default=list(TRIALS))
    options = parser.parse_args()
    folder, outcomes = options.folder.resolve(), []
    for version in options.versions:
        try:
            python = Path(sys.executable) if version == "here" else make_environment(folder, version)
        except subprocess.CalledProcessError:
            outcomes.append(Outcome(version=version, trial="install", passed=False, seconds=0.0, what="no environment"))
            continue
        for name in options.only:
            where = folder / "runs" / version / name.replace(" ", "-") / time.strftime("%H%M%S")
            outcomes.append(run_trial(python, version, name, where))
            print(f"{version} {name}: {outcomes[-1].what or 'passed'} ({outcomes[-1].seconds} s)", flush=True)
            write_json(options.json, [asdict(each) for each in outcomes])
    print(f"\n{time.strftime('%Y-%m-%d')}\n\n{markdown(outcomes)}")


if __name__ == "__main__":
    main()
