"""Cost of many nodes for the leader, and the time until a hang on one of them is named.

    python -m benchmarks.scale.many_nodes --nodes 512 --ranks-per-node 8 --seconds 15

One process serves the rendezvous store (like the launcher) and sends every node's digest once a second. This process is
the leader: its link gathers the digests, and once a second it joins and judges them, like `watch`. After two thirds of
the time one rank of the last node does not enter its collective, and all others wait for it. Digests are signed. Clock
offsets of the simulated nodes are not measured. Other load on the machine affects the times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from datetime import timedelta

from analyzers.hangs import analyze as hang
from analyzers.run.calls.recorded_calls import Call
from analyzers.run.calls.snapshot import AttemptView, RankView
from analyzers.run.live.digest import Digest, encode, joined, joined_log
from analyzers.run.policy import StallPolicy
from analyzers.run.records.event_log import EventLog
from benchmarks.harness import argument_parser
from watch.digests.link import ALL, LEADER, LEADER_KEY, DigestLink, digest_key
from watch.digests.signed_messages import Signer

SECOND = 1_000_000_000
STEP_NS = SECOND // 2
SECRET = b"of this benchmark"


def view_of(node: int, ranks_per_node: int, num_nodes: int, *, now_ns: int, stuck_since_ns: int) -> AttemptView:
    """Digest of a node's ranks, each in two groups; from `stuck_since_ns` on all ranks wait for the last rank of the
    job.
    """
    world = num_nodes * ranks_per_node
    last_ns = min(now_ns, stuck_since_ns)
    step = last_ns // STEP_NS % 1_000_000
    everybody, here = f"world:0-{world - 1}", f"tp:{node * ranks_per_node}-{(node + 1) * ranks_per_node - 1}"
    ranks, last_seq = {}, {}
    for rank in range(node * ranks_per_node, (node + 1) * ranks_per_node):
        is_late = rank == world - 1
        call = Call(
            rank=rank, group=everybody, seq=int(step) * 20, op="all_reduce", issue_ns=last_ns, num_bytes=25 << 20,
            dtype="float32", shape="(6553600,)", phase="backward", caller="train.py:210 step", step=int(step),
        )  # fmt: skip
        ranks[rank] = RankView(
            rank=rank, last_ns=last_ns, step=int(step), step_is_open=True, finished_steps=500,
            phases=("backward",), calls=() if is_late else (call,), num_in_flight=int(not is_late),
        )  # fmt: skip
        last_seq[(everybody, rank)] = int(step) * 20 - is_late
        last_seq[(here, rank)] = int(step) * 300
    members = {everybody: tuple(range(world)), here: tuple(ranks)}
    return AttemptView(attempt=0, ranks=ranks, members=members, last_seq=last_seq, median_step_ns=STEP_NS,
                       longest_step_ns=STEP_NS, world_size=world)  # fmt: skip


def send(num_nodes: int, ranks_per_node: int, seconds: float, stuck_after_s: float) -> None:
    """Run the other process with the store and the senders. Prints the port, then what it sent."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    print(store.port, flush=True)
    sys.stdin.readline()  # until the leader has connected
    begin = time.time_ns()
    stuck_ns = begin + int(stuck_after_s * SECOND)
    signers = {node: Signer(SECRET, node=node) for node in range(num_nodes)}
    leader = signers[LEADER].open("leader", bytes(store.get(LEADER_KEY)), sender=LEADER, to=ALL).session
    sizes = []
    while (now_ns := time.time_ns()) < begin + seconds * SECOND:
        for node in range(1, num_nodes):
            view = view_of(node, ranks_per_node, num_nodes, now_ns=now_ns, stuck_since_ns=stuck_ns)
            body = encode(Digest(node=node, sent_ns=time.time_ns(), view=view))
            data = signers[node].seal("digest", body, to=LEADER, echo=leader)
            sizes.append(len(data))
            store.set(digest_key(node), data)
        time.sleep(max(0.0, 1 - (time.time_ns() - now_ns) / SECOND))
    print(json.dumps({"bytes": statistics.mean(sizes), "stuck_ns": stuck_ns}), flush=True)


def lead(num_nodes: int, ranks_per_node: int, seconds: float) -> None:
    """Run the leader in this process."""
    stuck_after_s = seconds * 2 / 3
    command = [sys.executable, "-m", "benchmarks.scale.many_nodes", "--send", "--nodes", str(num_nodes)]
    command += ["--ranks-per-node", str(ranks_per_node), "--seconds", str(seconds), "--stuck-after", str(stuck_after_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdin is not None
        assert sender.stdout is not None
        port = int(sender.stdout.readline())
        ticks, named_ns, found = [], 0, None
        with DigestLink(f"127.0.0.1:{port}", node=0, num_nodes=num_nodes, secret=SECRET) as link:
            while not link.is_connected:
                time.sleep(0.01)
            sender.stdin.write("go\n")
            sender.stdin.flush()
            begin_ns = time.time_ns()
            cpu_s, since_s = time.process_time(), time.monotonic()
            while time.time_ns() - begin_ns < seconds * SECOND:
                tick_s, begin_cpu_s, now_ns = time.monotonic(), time.thread_time(), time.time_ns()
                digests = link.received()
                own_view = view_of(0, ranks_per_node, num_nodes, now_ns=now_ns,
                                   stuck_since_ns=begin_ns + int(stuck_after_s * SECOND))  # fmt: skip
                view = joined(own_view, digests, {node: clock.offset_ns for node, clock in link.clocks.items()})
                log = joined_log(EventLog([]), digests, {})
                found = hang.hang_of_attempt(view, log, StallPolicy(floor_s=3.0), is_last=True, now_ns=now_ns)
                ticks.append(time.thread_time() - begin_cpu_s)
                if found is not None and not named_ns:
                    named_ns = time.time_ns()
                time.sleep(max(0.0, 1 - (time.monotonic() - tick_s)))
            cpu_s, elapsed_s = time.process_time() - cpu_s, time.monotonic() - since_s
            traffic = link.traffic
        sent = json.loads(sender.stdout.readline())
    print(f"{num_nodes} nodes x {ranks_per_node} ranks, {elapsed_s:.0f} s")
    rate_kb, per_s = traffic.received_bytes / elapsed_s / 1e3, traffic.received / elapsed_s
    print(
        f"  a digest {sent['bytes']:,.0f} bytes; the leader reads {rate_kb:,.0f} kB/s, {per_s:,.0f} new ones a second"
    )
    share, median_ms, worst_ms = 100 * cpu_s / elapsed_s, 1e3 * statistics.median(ticks), 1e3 * max(ticks)
    print(f"  leader: {share:.1f} % of a core; a judgement {median_ms:,.0f} ms of CPU, {worst_ms:,.0f} ms at most")
    if found is None or not named_ns:
        print("  the hang was NOT named")
    else:
        print(
            f"  hang named {(named_ns - sent['stuck_ns']) / SECOND:.1f} s after it began (limit 3 s): {found.summary}"
        )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--nodes", type=int, default=512)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--stuck-after", type=float, default=10.0, help=argparse.SUPPRESS)
    parser.add_argument("--send", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.send:
        send(options.nodes, options.ranks_per_node, options.seconds, options.stuck_after)
    else:
        lead(options.nodes, options.ranks_per_node, options.seconds)


if __name__ == "__main__":
    main()
