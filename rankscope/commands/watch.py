"""`rankscope watch`: record and supervise a run on this node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from probes.tape.typed_path import analyze_command
from rankscope.terminal import RunArgument, echo, fail

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["EPILOG", "watch"]

EPILOG = (
    "\b\nExamples:\nrankscope watch runs/latest\nrankscope watch runs/latest --listen 127.0.0.1:9400\n"
    "rankscope watch runs/latest --listen 0.0.0.0:9400 --tls-cert node.pem --tls-key node.key --token-file token"
)


def watch(
    run: RunArgument,
    node_rank: Annotated[int, typer.Option("--node-rank", min=0, help="Index of this node.")] = 0,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address for /metrics. Default: the one in the configuration.")
    ] = "",
    tls_cert: Annotated[
        str, typer.Option(metavar="FILE", help="TLS certificate chain; required to listen beyond loopback.")
    ] = "",
    tls_key: Annotated[str, typer.Option(metavar="FILE", help="Private key of the certificate.")] = "",
    token_file: Annotated[
        str, typer.Option(metavar="FILE", help="File with the bearer token that scrapes must send.")
    ] = "",
) -> None:
    """Record and supervise a run that trains on this node (`train` starts it automatically)."""
    from probes.tape.attempts import all_ended
    from probes.tape.rundir import RunDir
    from store import StoreError
    from watch.background_loop import end_process
    from watch.node_process import run_watch

    if problem := _no_such_node(run, node_rank):
        fail(problem)
    arguments = [str(run), "--node-rank", str(node_rank), "--listen", listen]
    arguments += ["--tls-cert", tls_cert, "--tls-key", tls_key, "--token-file", token_file]
    try:
        code = run_watch(arguments)
    except StoreError as error:  # such as a read-only folder
        fail(str(error))
    if code == 0 and all_ended(RunDir(run)):
        echo(f"{run} has ended. Next: {analyze_command(run)}")
    end_process(code)


def _no_such_node(run: Path, node_rank: int) -> str:
    """Return an error message if the newest attempt has no node of this index, as `watch` would wait for its ranks
    forever. Return "" if the node has records or the number of nodes is unknown.
    """
    from probes.tape.attempts import claims
    from probes.tape.rundir import RunDir

    folder = RunDir(run)
    launches = list(claims(folder).values())
    num_nodes = launches[-1].get("nodes") if launches else None
    if not isinstance(num_nodes, int) or node_rank < num_nodes or folder.node_dir(node_rank).is_dir():
        return ""
    nodes = "one node, which has index 0" if num_nodes == 1 else f"nodes 0 to {num_nodes - 1}"
    return f"--node-rank {node_rank}: {run} has {nodes}"
