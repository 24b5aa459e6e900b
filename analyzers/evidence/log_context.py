"""Facts that other lines add to a cause: the rank that did not time out, unfinished work, addresses of peers.

candidates = [with_facts(candidate, book, ended) for candidate in candidates]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from analyzers.deaths.logged.logged_endings import Ended
from analyzers.hangs.policy import DeviceEvidencePolicy
from analyzers.logs.candidate import Candidate, from_lines, who
from analyzers.logs.log_events import MAX_QUOTED, LogBook, LogLine
from analyzers.policy import SHARED

__all__ = ["interface_candidates", "peer_addresses", "peer_texts", "with_facts"]

_OF_GPU = re.compile(r"\bGPU (\d{1,2})\b|\bcuda:(\d{1,2})\b")
_WAITED = ("not_entered", "signal", "rendezvous", "connection_lost", "exit")
_WAITS = ("not_entered", "all_entered")
_KILLED = ("signal", "exit")
_DO_AFTER_END = (
    "After training, one rank often saves, merges or uploads the model for longer than the others wait: raise the "
    "timeout (ddp_timeout, init_process_group(timeout=...)). Otherwise compare the ranks' numbers of steps."
)
_PEER = re.compile(
    r"(?:peer|remote|to|from|connect|(?:Read|Write) error) ?(?:address )?=?\[?(?:::ffff:)?(?P<address>"
    r"\d{1,3}(?:\.\d{1,3}){3}|\[?[0-9a-f]{0,4}(?::[0-9a-f]{0,4}){2,7})[\]%:<]|"
    r"\bremote=\[(?P<name>[A-Za-z][\w.-]{0,253})\]:\d"
)
_LOCAL = re.compile(r"^(?:127\.|::1$|0\.0\.0\.0|localhost$)")
_OWN_NAME = "127.0.1."
"""Address of a host's own name in /etc/hosts of Debian and Ubuntu; a single-host job never uses it."""
_LINK_LOCAL = re.compile(r"^(?:169\.254\.|fe80)", re.IGNORECASE)
_BRIDGE = "172.17."
"""Addresses of Docker's default bridge, which is local to each host."""
_VIRTUAL = re.compile(r"\](?P<name>(?:br-|veth|docker|virbr|cni|flannel|cali|lxc|tun)[\w.-]*):")
"""Interfaces of containers and virtual machines in NCCL's list, which lead to no other host."""
_REFUSED = re.compile(
    r"refused|unreachable|no route|timed? ?out|connectFullMesh|connect(?:ing)? (?:failed|to)", re.IGNORECASE
)


def with_facts(candidate: Candidate, book: LogBook, ended: Ended) -> Candidate:
    """Add facts from other lines about the same cause."""
    if not candidate.ranks and candidate.rank_class == "error" and candidate.cause in ("out_of_memory", "device_error"):
        candidate = _on_missing_rank(candidate, book, ended)
    if candidate.cause in _KILLED and not candidate.ranks and not candidate.evidence.get("host"):
        candidate = _on_lost_daemon(candidate, book)
    if candidate.cause in _WAITED:
        candidate = _with_work(candidate, book)
    if candidate.rank_class == "hang" and not candidate.is_proven:
        candidate = _with_network_event(candidate, book)
    return _after_end(candidate, book)


def _after_end(candidate: Candidate, book: LogBook) -> Candidate:
    """Add that the training had finished: nothing is lost then, and ranks may wait for the one that saves the model."""
    end = candidate.lines[0]
    done = [one for one in book.of("finished") if (one.number("later_steps") or 0) < SHARED.min_times]
    before = [one for one in done if one.source == end.source and one.line < end.line]
    elsewhere = [one for one in done if one.source != end.source and one.rank in candidate.ranks]
    if before:
        what = f"Training had finished before that ({before[-1].place})"
    elif elsewhere and candidate.cause == "not_entered":
        what = f"Its own log says that the training finished ({elsewhere[-1].place})"
    else:
        return candidate
    evidence = candidate.evidence if candidate.cause not in _WAITS else {**candidate.evidence, "do": _DO_AFTER_END}
    return replace(candidate, what=f"{candidate.what}. {what}", evidence=evidence)


def _on_missing_rank(candidate: Candidate, book: LogBook, ended: Ended) -> Candidate:
    """Assign an error without a rank to the only rank without a timed-out call, unless the error names another GPU."""
    waited = {entry.rank for entry in book.of("watchdog_timeout", "gloo_timeout") if entry.rank is not None}
    waited |= ended.victims.keys()
    match = _OF_GPU.search(f"{candidate.lines[0].text('message')} {candidate.lines[0].message} "
                           f"{' '.join(entry.message for entry in candidate.lines)}")  # fmt: skip
    device = int(match[1] or match[2]) if match else None
    size = book.world_size or max((*waited, -1)) + 1
    missing = [rank for rank in range(min(size, 4096)) if rank not in waited]
    if waited and len(missing) == 1 and device in (None, missing[0]) and size > 2:
        rank = missing[0]
        others = f"every other rank of {size} waited for it"
        why = f"{candidate.why}: {f'GPU {device}, and ' if device is not None else ''}{others}"
        return replace(
            candidate,
            ranks=(rank,),
            what=candidate.what.replace(who(()), who((rank,)), 1),
            why=why,
            is_proven=False,
            evidence={**candidate.evidence, "gpu": device, "waiting_ranks": sorted(waited)},
        )
    if device is not None:
        named = f"The rank on GPU {device}"
        return replace(candidate, what=candidate.what.replace(who(()), named, 1),
                       evidence={**candidate.evidence, "gpu": device})  # fmt: skip
    return candidate


def _on_lost_daemon(candidate: Candidate, book: LogBook) -> Candidate:
    """Add a node to the end of a process if its line names none and mpirun lost the daemon of a single node."""
    nodes = {name for entry in book.of("mpi_daemon_lost") if (name := entry.text("daemon"))}
    if len(nodes) != 1:
        return candidate
    (node,) = nodes
    return replace(candidate, what=f"{candidate.what}. mpirun lost its daemon on {node}",
                   evidence={**candidate.evidence, "host": node})  # fmt: skip


def _with_network_event(candidate: Candidate, book: LogBook) -> Candidate:
    """Add the first network event near the time at which a wait that timed out began."""
    limit_ns = DeviceEvidencePolicy().before_s * 1e9
    waits = [entry for entry in candidate.lines if entry.wall_ns is not None and entry.number("ran_ms")]
    if not waits:
        return candidate
    began_ns = min((entry.wall_ns or 0) - (entry.number("ran_ms") or 0) * 10**6 for entry in waits)
    events = [entry for entry in book.of("nccl_warning", "link_down") if entry.wall_ns is not None
              and abs(entry.wall_ns - began_ns) <= limit_ns
              and (entry.kind == "link_down" or "NET/" in entry.message)]  # fmt: skip
    if not events:
        return candidate
    first = events[0]
    text = first.message[:MAX_QUOTED].rstrip(". ")
    what = f'{candidate.what}. When this wait began, {first.host or "the log"} reported "{text}" ({first.place})'
    return replace(candidate, what=what, lines=(*candidate.lines, first))


def _with_work(candidate: Candidate, book: LogBook) -> Candidate:
    """Add the last unfinished progress bar of work other than training."""
    lines = [entry for entry in book.of("working") if entry.number("of")]
    open_bars = [entry for entry in lines[-5:] if (entry.number("done") or 0) < (entry.number("of") or 0)]
    if not open_bars or (lines and lines[-1].number("done") == lines[-1].number("of")):
        return candidate
    last = max(open_bars, key=lambda entry: (entry.number("done") or 0) / (entry.number("of") or 1))
    spent = f" after {last.text('spent')}" if last.text("spent") else ""
    work = f"{last.text('work').strip()}: {last.number('done') or 0:,} of {last.number('of'):,}{spent}"
    return replace(
        candidate,
        what=f'{candidate.what}. Its last line in the log is "{work}" ({last.place})',
        evidence={**candidate.evidence, "unfinished_work": work},
    )


def peer_addresses(lines: tuple[LogLine, ...]) -> list[str]:
    """Peer addresses of connections that broke or could not be made."""
    found = (match for entry in lines for match in _PEER.finditer(f"{entry.text('message')} {entry.message}"))
    return list(dict.fromkeys((match["address"] or match["name"]).strip("[]") for match in found))


def peer_texts(peers: Sequence[str]) -> tuple[str, str | None]:
    """Return (phrase for the peers, next step). The next step is None if no peer is known: the cause has its own."""
    if peers and all(map(_LOCAL.match, peers)):
        return "a process on the same host", "Read the ends of the logs of the other ranks on that host."
    text = f"the peer{'s' * (len(peers) > 1)} {', '.join(peers[:4])}"
    if not peers:
        return text, None
    return text, f"Read the log of the process at {peers[0]}, and that of its host or pod (kubectl describe pod)."


def interface_candidates(book: LogBook) -> list[Candidate]:
    """Candidates for an interface of NCCL or gloo that other hosts cannot reach: loopback, link-local or virtual."""
    interfaces = list(book.of("nccl_interface"))
    hosts = {entry.host for entry in interfaces if entry.host}
    first_of: dict[str | None, LogLine] = {}
    for entry in interfaces:
        first_of.setdefault(entry.host, entry)  # NCCL uses the first interface that it lists
    local = [entry for entry in first_of.values() if _LOCAL.match(entry.text("address"))]
    broken = [entry for entry, rule in book.of_role("root", "victim", "nccl", "exception")
              if _REFUSED.search(f"{entry.text('message')} {entry.message}")]  # fmt: skip
    broken += [entry for entry in book.of("nccl_warning") if _REFUSED.search(entry.message)]
    if local and len(hosts) > 1 and broken:
        entry = local[0]
        names = f"{entry.text('interface')}:{entry.text('address')}"
        what = f"NCCL uses {names} although the job spans {len(hosts)} hosts: the others cannot reach that address"
        return [_wrong_interface(what, local, broken, "NCCL_SOCKET_IFNAME")]
    if not broken and len(hosts) > 1 and (virtual := _virtual(interfaces)):
        calls = [one for one in book.of("nccl_error") if one.text("unhandled") == "system"]
        what = f"A system call of NCCL failed, and its interfaces on {len(hosts)} hosts include some of containers or "
        what += f"virtual machines ({', '.join(virtual)}), which cannot reach other hosts"
        return [_wrong_interface(what, interfaces[:2], calls, "NCCL_SOCKET_IFNAME")] if calls else []
    local_only = [(entry, address) for entry in broken for address in _addresses(entry) if _LINK_LOCAL.match(address)]
    loopbacks = [(entry, address) for entry in broken for address in _addresses(entry) if _LOCAL.match(address)]
    own_name = [(entry, address) for entry, address in loopbacks if address.startswith(_OWN_NAME)]
    if not local_only and loopbacks and (_hosts(book) > 1 or any(book.of("gloo_loopback"))):
        local_only = loopbacks
    bridged = [(entry, address) for entry in broken for address in _addresses(entry) if address.startswith(_BRIDGE)
               and (entry.host or "")[:1].isdigit() and not (entry.host or "").startswith(_BRIDGE)]  # fmt: skip
    local_only = local_only or own_name or bridged
    fallback = next(book.of("gloo_loopback"), None)
    failed = next(book.of("gloo_mesh_failed"), None)
    if not local_only and fallback is not None and failed is not None:
        what = "gloo used the loopback address, because the host name resolves to no other: other hosts cannot reach it"
        return [_wrong_interface(what, [fallback], [failed], "GLOO_SOCKET_IFNAME")]
    if local_only:
        entry, address = local_only[0]
        name = (
            "GLOO_SOCKET_IFNAME"
            if "gloo" in f"{entry.text('message')} {entry.message}".lower()
            else "NCCL_SOCKET_IFNAME"
        )
        reach = "host" if _LOCAL.match(address) or address.startswith(_BRIDGE) else "link"
        what = f"A connection went to {address}, which is valid on one {reach} only: the wrong interface was chosen"
        return [_wrong_interface(what, [entry], [], name)]
    return []


def _virtual(interfaces: Sequence[LogLine]) -> list[str]:
    """Names of the first virtual interfaces in NCCL's lists; at most 4."""
    names = (match["name"] for entry in interfaces for match in _VIRTUAL.finditer(entry.message))
    return list(dict.fromkeys(names))[:4]


def _addresses(entry: LogLine) -> list[str]:
    text = entry.text("address")
    peers = (one for one in peer_addresses((entry,)) if one[:1].isdigit() or ":" in one)  # names have no interface
    return [*([text.strip("[]")] if text else []), *peers]


def _hosts(book: LogBook) -> int:
    return len({entry.host for entry in book.lines if entry.host and not entry.host[:1].isdigit()})


def _wrong_interface(what: str, lines: list[LogLine], broken: list[LogLine], name: str) -> Candidate:
    exclusion = ", or exclude lo and docker0 (NCCL_SOCKET_IFNAME=^lo,docker0)" if name.startswith("NCCL") else ""
    return from_lines(
        "no_interface", (*lines[:4], *broken[:4]),
        rank_class="network",
        what=what,
        why=lines[0].quoted,
        is_proven=False,
        evidence={"do": f"Set {name} to the interface that all nodes share (`ip -br addr`){exclusion}."},
        collect=("ip -br addr # on every host",),
    )  # fmt: skip
