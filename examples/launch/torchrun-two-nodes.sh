#!/usr/bin/env bash
# A training script of your own on two nodes, started by hand or by whatever starts a command on each of them.
#
#   node 0:  ./torchrun-two-nodes.sh 0 node-0 train.py --epochs 3
#   node 1:  ./torchrun-two-nodes.sh 1 node-0 train.py --epochs 3
#
# With `rankscope train` in place of torchrun, a configuration in place of the script: see ssh-two-nodes.sh.
set -euo pipefail

if [ "$#" -lt 3 ]; then
  echo "usage: $0 NODE_RANK HEAD SCRIPT [ARGUMENT...]" >&2
  exit 2
fi
node_rank=$1 head=$2
shift 2

# What is missing on this machine, before an hour of waiting tells it. Exit code 1: something that training needs.
rankscope doctor

exec torchrun \
  --nnodes "${NNODES:-2}" --nproc-per-node "${NPROC_PER_NODE:-8}" --node-rank "$node_rank" \
  --rdzv-backend c10d --rdzv-endpoint "$head:${PORT:-29500}" --rdzv-id "${RUN_ID:-rankscope}" \
  --max-restarts "${MAX_RESTARTS:-3}" \
  "$@"
