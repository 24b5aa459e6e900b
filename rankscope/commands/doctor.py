"""`rankscope doctor`: what is missing on this machine, and how to get it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankscope.terminal import fail

__all__ = ["EPILOG", "doctor"]

EPILOG = (
    "Examples:  rankscope doctor   |   rankscope doctor --runs /data/runs   |   "
    "srun --ntasks-per-node 1 rankscope doctor --format json"
)


def doctor(
    runs: Annotated[Path, typer.Option("--runs", metavar="FOLDER", help="Where runs are to lie.")] = Path("runs"),
    dcgm_url: Annotated[
        str, typer.Option("--dcgm-url", metavar="URL", help="/metrics of a dcgm-exporter.")
    ] = "http://127.0.0.1:9400/metrics",
    output: Annotated[str, typer.Option("--format", help="text or json.", metavar="text|json")] = "text",
) -> None:
    """Say what this machine has, what is missing, and how to get it. Changes nothing.

    Exit codes: 0 nothing has failed (notes are about what is optional), 1 something that training needs does not work,
    2 a mistake in the options.
    """
    if output not in ("text", "json"):
        fail(f"--format {output}: choose text or json")
    from trainer.doctor.check import to_json, worst
    from trainer.doctor.devices import device_checks
    from trainer.doctor.machine import machine_checks
    from trainer.doctor.packages import package_checks

    checks = [*package_checks(), *device_checks(dcgm_url), *machine_checks(runs)]
    if output == "json":
        import json

        typer.echo(json.dumps(to_json(checks), indent=2))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            typer.echo(f"{check.status:<7}  {check.name:<{width}}  {check.found}")
            if check.remedy:
                typer.echo(f"{'':<7}  {'':<{width}}  -> {check.remedy}")
    raise typer.Exit(worst(checks) == "failed")
