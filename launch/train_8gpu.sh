#!/usr/bin/env bash
# One node of eight GPUs: five target ranks, three drafter ranks. Arguments are settings: name=mine steps=10000
set -euo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
exec torchrun --standalone --nproc_per_node 8 -m dflash_ddp.train "$@"
