"""What a report says about lost ranks, excluded devices or nodes, and differing resumes: evidence and next step."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from analyzers.causes import next_step
from analyzers.finding import Finding, evidence_of
from analyzers.health.program_faults import is_of_kernel
from analyzers.memory.allocator_message import holders_text, others_hold_it
from analyzers.memory.snapshot_text import is_fragmented, why_text
from analyzers.run.ends.thread_errors import check_thread_first
from analyzers.wording import counted, cut, is_number, listed, ranks_text, sentence

__all__ = ["NEXT", "WHY"]

_LIBRARY = re.compile(r"ALLOC(ATION)?_FAILED|CUDA error: out of memory|Cuda failure", re.IGNORECASE)
"""Errors of allocations outside torch's cache: by cuBLAS, cuDNN, NCCL, or the driver itself."""
_RESUME = re.compile(r"Resume the run\. |, then resume the run\b")
MAX_MESSAGE = 140
"""Maximum characters of an error's message; the evidence has the whole message."""


def _why_lost(finding: Finding) -> str:
    facts = evidence_of(finding)
    lines = str(facts.get("message") or "").strip().splitlines()
    error = ": ".join(str(part) for part in (facts.get("error_type"), *lines[:1]) if part)
    code = "" if facts.get("exit_code") is None else f"exit code {facts['exit_code']}"
    if finding.cause == "launcher_lost":
        return sentence(
            f"process {facts.get('launcher_pid')} had ended: killed, crashed, or unable to write its records to disk"
        )
    if finding.cause == "node_failed":
        return sentence(f"node {facts.get('node_rank')} sent no digest for {facts.get('silent_s')} s, and none later")
    if finding.cause == "out_of_memory" and (used := why_text(finding)):
        return sentence(used)
    what = error or str(facts.get("signal") or "") or code or "no error was recorded"
    what = cut(what.replace(";", ","), MAX_MESSAGE)
    if what.lower() in finding.summary.lower():
        return ""  # the summary already contains the message
    at = f" ({facts['raised_at']})" if facts.get("raised_at") else ""
    victims = counted(len(facts.get("victims") or []), "other rank" if finding.ranks else "rank")
    return sentence(what + at + (f", and {victims} ended because of it" if victims else ""))


def _next_exception(finding: Finding, rank: str) -> str:
    raised_at, message = finding.evidence.get("raised_at"), str(finding.evidence.get("message") or "")
    if "device-side assert" in message:
        if finding.evidence.get("assertion") and raised_at:
            return f"Check the indexes and labels at or before {raised_at}: the assertion and its kernel are below."
        where = f"Check the indexes and labels at or before {raised_at}: t" if raised_at else "T"
        return f"{where}he log of {rank} has the assertion, its kernel and its thread (search it for `Assertion`)."
    if is_of_kernel(message) and raised_at:
        return f"Check {raised_at} and the kernels before it: CUDA_LAUNCH_BLOCKING=1 names the one that failed."
    if raised_at:
        return f"Check {raised_at}."
    is_from_log = bool(finding.evidence.get("lines"))  # the user has the log: do not tell the user to read it
    return next_step("exception", finding.ranks) if is_from_log else f"Read the traceback in the log of {rank}."


def _next_out_of_memory(finding: Finding, rank: str) -> str:
    facts = finding.evidence
    if others_hold_it(facts):
        return sentence(f"end or move the other processes on that device: {holders_text(facts)}")
    if not is_number(facts.get("requested_bytes")) and _LIBRARY.search(str(facts.get("message") or "")):
        return (
            "Check which processes use the device's memory (`nvidia-smi`), and leave some for libraries: they allocate "
            "outside of torch's cache."
        )
    if is_fragmented(finding.evidence):
        return (
            "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: the cache had enough free memory, but it was "
            "fragmented. If that is not enough, lower the micro-batch or the sequence length."
        )
    if site := finding.evidence.get("largest_site"):
        return f"Check {str(site)[:80]}, and the memory of {rank} over the steps."
    if facts.get("lines"):  # the finding is from a log, which does not show the memory of each step
        return next_step("out_of_memory", finding.ranks)
    return f"Compare the memory of {rank} over the steps and with that of its peers."


def _next_lost(finding: Finding) -> str:
    if finding.cause == "exception":
        return check_thread_first(finding) + _next_exception(finding, ranks_text(finding.ranks))
    if finding.cause == "out_of_memory":
        return _next_out_of_memory(finding, ranks_text(finding.ranks))
    if finding.cause == "exit" and (raised_at := finding.evidence.get("raised_at")):
        where = f"Check {raised_at}, where {'it' if len(finding.ranks) == 1 else 'they'} exited."
        return check_thread_first(finding) + where
    if finding.cause == "signal" and finding.evidence.get("xids"):
        return (
            f"Search the log of {ranks_text(finding.ranks)} for the kernel's error (`Assertion`, `illegal memory "
            "access`); with CUDA_LAUNCH_BLOCKING=1 the traceback has the line."
        )
    advice = next_step(finding.cause, finding.ranks, signal=str(finding.evidence.get("signal")))
    has_restarted = finding.severity == "warning"
    return _RESUME.sub("", advice) if has_restarted else advice


_EXCLUDED_FOR = {
    "straggler": "The device slowed all ranks down, and the run continued without it.",
    "xid": "The driver reported an error that calls for replacing the device, and the run continued without it.",
}


def _why_excluded(finding: Finding) -> str:
    if sentence_for := _EXCLUDED_FOR.get(str(finding.evidence.get("excluded_for"))):
        return sentence_for
    failures: Any = finding.evidence.get("num_failures")
    known = is_number(failures) and failures > 0
    count = f"{counted(failures, 'failure')} there" if known else "it failed repeatedly"
    return sentence(f"{count}, of a kind that hardware can cause, and the run continued without it")


def _next_excluded(finding: Finding) -> str:
    if finding.cause == "device":
        return "Test the device (XIDs, ECC errors, dcgmi diag -r 3) before it is used again."
    return "Check the node's kernel log and drain the node. To admit it again, delete the launcher's exclusion file."


def _why_resume(finding: Finding) -> str:
    parts = listed(evidence_of(finding).get("differing_parts") or [])
    if parts == "data":
        return "The comparison covers a hash of the corpus (for a .bin: of its size and 64 samples) and the next batch."
    return f"The signatures in the checkpoint's manifest differ for: {parts or 'parts that were not recorded'}."


WHY: Mapping[str, Callable[[Finding], str]] = {
    "rank_lost": _why_lost,
    "excluded": _why_excluded,
    "resume_differs": _why_resume,
}
NEXT: Mapping[str, Callable[[Finding], str]] = {
    "rank_lost": _next_lost,
    "excluded": _next_excluded,
    "resume_differs": lambda finding: "If the change of data or seed was not intended, discard the steps since.",
}
