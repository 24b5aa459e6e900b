"""`rankscope stacks`: Python stacks of a hung job's processes, grouped. This works for jobs that were not recorded,
too."""

from __future__ import annotations

from typing import Annotated

import typer

from rankscope.terminal import FormatOption, echo, fail, print_json, wants_json

__all__ = ["EPILOG", "stacks"]

EPILOG = (
    "\b\nExamples:\nrankscope stacks\nrankscope stacks 4711 4712 4713 4714\n"
    "srun --overlap --jobid JOB --nodes N --ntasks-per-node 1 rankscope stacks"
)
SHOWN_FRAMES = 12


def stacks(
    pids: Annotated[
        list[int] | None,
        typer.Argument(metavar="[PID]...", help="Processes. Default: all on this machine with a RANK."),
    ] = None,
    output: FormatOption = "text",
) -> None:
    """Take Python stacks of running processes and name those that differ from the rest.

    Needs py-spy (`pip install 'rankscope[stacks]'`) and permission to trace the processes. Changes nothing in them.
    Exit codes: 0 stacks were taken, 2 no process could be read.
    """
    as_json = wants_json(output)
    from analyzers.hangs.stacks import group, outlying_stacks
    from watch.stacks.pyspy import StacksError, ranks_here, take

    chosen = pids or ranks_here()
    if not chosen:
        fail("no process on this machine has a RANK in its environment: name the processes, e.g. rankscope stacks 4711")
    try:
        taken = [take(pid) for pid in chosen]
    except StacksError as error:
        fail(str(error))
    if not any(stack.frames for stack in taken):
        fail("; ".join(f"pid {stack.pid}: {stack.problem or 'no stack'}" for stack in taken))
    groups = group(taken)
    odd = outlying_stacks(groups)
    verdict = _verdict(len(taken), [stack.name for stack in odd], any(stack.is_stopped for stack in odd))
    if as_json:
        processes = [
            {"name": stack.name, "pid": stack.pid, "rank": stack.rank, "stopped": stack.is_stopped,
             "is_outlier": stack in odd, "problem": stack.problem, "frames": [str(frame) for frame in stack.frames]}
            for stack in taken
        ]  # fmt: skip
        print_json({"verdict": verdict, "processes": processes})
        return
    for found in groups:
        first = found.members[0]
        who = ", ".join(
            stack.name if stack.rank is None else f"{stack.name} (pid {stack.pid})" for stack in found.members
        )
        state = "  stopped" if first.is_stopped else ""
        echo(f"{who}{state}{'  <- odd one out' if first in odd else ''}")
        for frame in found.frames[:SHOWN_FRAMES]:
            echo(f"    {frame}")
        if len(found.frames) > SHOWN_FRAMES:
            echo(f"    ... and {len(found.frames) - SHOWN_FRAMES} more")
        if first.problem:
            echo(f"    {first.problem}")
        echo("")
    echo(verdict)


def _verdict(num: int, odd: list[str], are_stopped: bool) -> str:
    if num < 2:
        return "Only one process: there is nothing to compare it with."
    if not odd:
        return f"{num} processes, no odd one out: all wait in the same place, or all differ."
    many = len(odd) > 1
    names = ", ".join(odd[:8]) + (f" and {len(odd) - 8} more" if len(odd) > 8 else "")
    if are_stopped:
        return f"Check {names} first: {'they are' if many else 'it is'} stopped (kill -CONT resumes)."
    others = num - len(odd)
    return f"Check {names} first: {'their stacks differ' if many else 'its stack differs'} from the other {others}."
