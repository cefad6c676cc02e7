#!/usr/bin/env bash
# One node of eight GPUs. Arguments are settings; without a split, five target ranks and three drafter ranks.
# RESTARTS=3 starts the ranks anew after a failure; they go on from the newest checkpoint.
#   launch/train_8gpu.sh name=mine steps=10000
set -euo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}" HYDRA_FULL_ERROR=1
exec torchrun --standalone --nproc_per_node 8 --max_restarts "${RESTARTS:-0}" -m dflash_ddp.train "$@"
