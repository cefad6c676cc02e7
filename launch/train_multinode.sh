#!/usr/bin/env bash
# Run this on every node, with NODES, and HEAD: the host name of one of them. outputs/ must be on a shared file system.
# Each node gets ranks of both roles where the numbers allow; split.targets + split.drafters = GPUS * NODES.
#   NODES=2 HEAD=node0 launch/train_multinode.sh split.targets=10 split.drafters=6 batches_per_step=6
set -euo pipefail
: "${NODES:?number of nodes}" "${HEAD:?host name of the first node}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}" HYDRA_FULL_ERROR=1
exec torchrun --nnodes "$NODES" --nproc_per_node "${GPUS:-8}" --max_restarts "${RESTARTS:-0}" \
    --rdzv_backend c10d --rdzv_endpoint "$HEAD:${PORT:-29400}" --rdzv_id "${RUN_ID:-dflash}" \
    -m dflash_ddp.train "$@"
