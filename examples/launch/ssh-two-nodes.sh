#!/usr/bin/env bash
# `rankscope train` on several machines that share a folder, over plain SSH and without a scheduler.
#
#   ./ssh-two-nodes.sh my.toml node-0 node-1
#
# The first machine hosts the rendezvous. Ctrl-C stops all of them, with a checkpoint; so does the end of this shell. Run
# it in a folder that all machines see under the same path, with .venv in it.
set -euo pipefail

if [ "$#" -lt 3 ]; then
  echo "usage: $0 CONFIG HOST HOST..." >&2
  exit 2
fi
config=$1
shift
hosts=("$@")
head=${hosts[0]}
here=$(pwd)

pids=()
# shellcheck disable=SC2329
stop() {
  for pid in "${pids[@]}"; do
    kill -TERM "$pid" 2>/dev/null || true
  done
}
trap stop INT TERM EXIT

for node_rank in "${!hosts[@]}"; do
  # -tt: the remote side gets a terminal, and SIGHUP when this shell ends, which stops it with a checkpoint.
  ssh -tt -o BatchMode=yes "${hosts[$node_rank]}" \
    "cd $(printf %q "$here") && exec .venv/bin/rankscope train $(printf %q "$config") \
      --nnodes ${#hosts[@]} --node-rank $node_rank --nproc-per-node ${NPROC_PER_NODE:-8} \
      --rdzv-endpoint $head:${PORT:-29500}" </dev/null &
  pids+=("$!")
done

code=0
for pid in "${pids[@]}"; do
  wait "$pid" || code=$?
done
exit "$code"
