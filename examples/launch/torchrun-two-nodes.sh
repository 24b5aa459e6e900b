#!/usr/bin/env bash
# Your own training script on two nodes; run this on each node, by hand or by any tool.
#
#   node 0:  ./torchrun-two-nodes.sh 0 node-0 train.py --epochs 3
#   node 1:  ./torchrun-two-nodes.sh 1 node-0 train.py --epochs 3
#
# For `rankscope train`, see ssh-two-nodes.sh.
set -euo pipefail

if [ "$#" -lt 3 ]; then
  echo "usage: $0 NODE_RANK HEAD SCRIPT [ARGUMENT...]" >&2
  exit 2
fi
node_rank=$1 head=$2
shift 2

# Exits with code 1 if this machine lacks something that training needs.
rankscope doctor

exec torchrun \
  --nnodes "${NNODES:-2}" --nproc-per-node "${NPROC_PER_NODE:-8}" --node-rank "$node_rank" \
  --rdzv-backend c10d --rdzv-endpoint "$head:${PORT:-29500}" --rdzv-id "${RUN_ID:-rankscope}" \
  --max-restarts "${MAX_RESTARTS:-3}" \
  "$@"
