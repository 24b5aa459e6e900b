"""Judge records of other programs, GPU readings and process stacks, with the analyses of recorded runs.

device_findings(store)                  # of table `health`
stack_findings(files.programs.stacks())
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from analyzers.finding import Finding
from analyzers.hangs.stacks import Stack, StackGroup, group, is_library, outlying_stacks
from analyzers.health.analyze import NUM_CHECKS, device_health, unread_of_devices
from analyzers.policy import SHARED
from analyzers.scope import Scope
from analyzers.source import Source
from analyzers.wording import processes_text, ranks_text, sentence
from store.readers.programs.rows import StackOfProcess

__all__ = ["device_findings", "stack_findings"]

MAX_FRAMES = 6
_LIBRARY = re.compile(r"torch/|(?:threading|selectors|queue|socket|ssl)\.py:")
"""Frames of libraries as py-spy shortens them."""
_SYSTEM = re.compile(
    r"(?:nptl|linux|unix|posix|csu|x86_64|aarch64)/[\w.-]+\.[chS]\b|(?:Python|Objects|Programs)/[\w.-]+\.c\b|"
    r"Modules/main\.c|internal/pycore_|\S*\blib(?:c|m|pthread|stdc\+\+)[.-]|\? |\S+ \?\?$|[\w/.-]*python[\d.]* "
)
"""Frames that every process has (of the C library and of Python's interpreter), and gdb's frames without a name."""
_WAITS = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|barrier|broadcast|all_?to_?all|synchronize|nccl|gloo|\bwait\b|_wait\b",
    re.IGNORECASE,
)


def device_findings(source: Source) -> list[Finding]:
    """Findings from device readings, and one on checks for which the readings lack values."""
    wrong = [one for one in device_health(source, Scope()) if one.status in ("fired", "suspect")]
    wrong += _errors_before(source)
    unread = unread_of_devices(source)
    if wrong or not unread:
        return wrong
    text, in_part = f"the readings lack {', '.join(unread)}", len({*unread, "temperature"}) < NUM_CHECKS
    what = "GPUs were not fully checked" if in_part else "GPUs were not checked"
    return [Finding.not_judged("health", "health", what, text, in_part=in_part)]


def _errors_before(source: Source) -> list[Finding]:
    """Report uncorrectable ECC errors if their count is the same in all readings, so that it is unknown when they
    occurred."""
    return [
        Finding(
            analyzer="health",
            kind="gpu_memory_errors",
            severity="warning",
            status="suspect",
            cause="uncorrected",
            summary=f"{device} of {node}: {errors:,} uncorrectable ECC error{'s' * (errors != 1)} since its driver "
            "was loaded.",
            evidence={"node": node, "device": device, "uncorrected": errors},
            advice="gpu-memory-errors-uncorrected",
        )
        for node, device, errors in source.rows(
            "SELECT node, device, max(ecc_uncorrected_total) FROM health WHERE device <> 'host' GROUP BY node, device "
            "HAVING max(ecc_uncorrected_total) > 0 AND max(ecc_uncorrected_total) = min(ecc_uncorrected_total) "
            "ORDER BY node, device"
        )
    ]


def stack_findings(read: Sequence[StackOfProcess]) -> list[Finding]:
    """If most processes wait in communication, find the processes that have other stacks."""
    groups = group([Stack(pid=one.pid, rank=one.rank, frames=_program_frames(one.frames)) for one in read])
    odd = outlying_stacks(groups) if len(read) >= SHARED.min_times else ()
    most = groups[0]
    waits = any(
        _WAITS.search(frame) for one in read if _program_frames(one.frames) == most.frames for frame in one.frames
    )
    if not odd or not waits:
        places = "; ".join(f"{_who(one.members)} in {_place(one)}" for one in groups[:4])
        return [Finding.insufficient("hang", "hang", sentence(f"the stacks alone name no rank: {places}"))]
    ranks = tuple(sorted(stack.rank for stack in odd if stack.rank is not None))
    odd_groups = [one for one in groups[1:] if set(one.members) & set(odd)]
    where = "; ".join(f"{_who(one.members)} in {_place(one)}" for one in odd_groups[:4])
    waiting = [stack.rank for stack in most.members if stack.rank is not None]
    return [
        Finding(
            analyzer="hang",
            kind="hang",
            severity="critical",
            status="suspect",
            ranks=ranks,
            cause="not_entered",
            summary=sentence(f"most processes wait in {_place(most)} ({_who(most.members)}), and not {where}")
            + " Stacks from a single moment do not prove that it is stuck.",
            evidence={
                "waiting_ranks": waiting,
                "stack_groups": [_shown(one) for one in groups[:8]],
                **({} if ranks else {"odd_pids": sorted(stack.pid for stack in odd)[:64]}),
                "doing": {str(stack.rank): stack.frames[0] for stack in odd if stack.rank is not None and stack.frames},
            },
            advice="hang-not_entered",
        )
    ]


def _program_frames(frames: Sequence[str]) -> tuple[str, ...]:
    """Frames of the program itself; if there are none, as in gdb's backtrace, of the libraries that it calls."""
    called = [frame for frame in frames if not _SYSTEM.match(frame)]
    own = [frame for frame in called if not (is_library(frame) or _LIBRARY.match(frame)) and ":" in frame.split(" ")[0]]
    return tuple((own or called or list(frames))[:MAX_FRAMES])


def _place(one: StackGroup) -> str:
    return one.frames[0] if one.frames else "an unknown place"


def _who(members: Sequence[Stack]) -> str:
    ranks = sorted(stack.rank for stack in members if stack.rank is not None)
    return ranks_text(ranks) if len(ranks) == len(members) else processes_text([stack.pid for stack in members])


def _shown(one: StackGroup) -> dict[str, Any]:
    ranks = [stack.rank for stack in one.members if stack.rank is not None]
    pids = {} if ranks else {"pids": sorted(stack.pid for stack in one.members)[:64]}
    return {"ranks": ranks[:64], "num_ranks": len(one.members), "frames": list(one.frames), **pids}
