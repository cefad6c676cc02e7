#!/usr/bin/env bash
# Run this on every node. NODES, and HEAD (host name of one of them) must be set; split.targets + split.drafters = 8 * NODES.
#   NODES=2 HEAD=node0 launch/train_multinode.sh split.targets=10 split.drafters=6
set -euo pipefail
: "${NODES:?number of nodes}" "${HEAD:?host name of the first node}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
exec torchrun --nnodes "$NODES" --nproc_per_node "${GPUS:-8}" --rdzv_backend c10d \
    --rdzv_endpoint "$HEAD:${PORT:-29400}" --rdzv_id "${RUN_ID:-dflash}" -m dflash_ddp.train "$@"
