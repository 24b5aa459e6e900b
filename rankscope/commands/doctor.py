"""`rankscope doctor`: check this machine: what is there, what is missing, how to install it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankscope.terminal import FormatOption, echo, fail, print_json, wants_json

__all__ = ["EPILOG", "doctor"]

EPILOG = (
    "\b\nExamples:\nrankscope doctor\nrankscope doctor --runs /data/runs\n"
    "srun --ntasks-per-node 1 rankscope doctor --format json"
)


def doctor(
    runs: Annotated[
        Path, typer.Option("--runs", metavar="FOLDER", help="Folder in which runs will be written.")
    ] = Path("runs"),
    dcgm_url: Annotated[
        str, typer.Option("--dcgm-url", metavar="URL", help="Address of a dcgm-exporter's metrics.")
    ] = "http://127.0.0.1:9400/metrics",
    output: FormatOption = "text",
) -> None:
    """Check this machine: what is there, what is missing, and how to install it. Changes nothing.

    Exit codes: 0 nothing failed (notes concern optional parts), 1 a part that training needs does not work, 2 wrong
    options.
    """
    as_json = wants_json(output)
    if runs.is_file():
        fail(f"--runs {runs} is a file: name a folder")
    if not dcgm_url.startswith(("http://", "https://")):
        fail(f"--dcgm-url {dcgm_url}: give an address like http://127.0.0.1:9400/metrics")
    from trainer.doctor.check import to_json, worst
    from trainer.doctor.devices import device_checks
    from trainer.doctor.machine import machine_checks
    from trainer.doctor.packages import package_checks

    checks = [*package_checks(), *device_checks(dcgm_url), *machine_checks(runs)]
    if as_json:
        print_json(to_json(checks))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            echo(f"{check.status:<7}  {check.name:<{width}}  {check.found}")
            if check.remedy:
                echo(f"{'':<7}  {'':<{width}}  -> {check.remedy}")
    raise typer.Exit(worst(checks) == "failed")
