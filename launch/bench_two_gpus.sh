#!/usr/bin/env bash
# Two GPUs of one host: lanes and what they take from compute, the stream with random delays, training of the 8b workload with random target weights,
# disaggregated beside its parts alone and colocated on one and on two GPUs. One JSON row each. Arguments are further settings of the training runs.
set -euo pipefail
export HF_HUB_OFFLINE=1
python -m dflash_ddp.bench lane gib=1,2.5 workload=8b
python -m dflash_ddp.bench stream targets=1 target_ms=20 drafter_ms=15 jitter=0.9 mib=256 "items=${SOAK_ITEMS:-3000}"
python -m dflash_ddp.bench pipeline workload=8b split=1t1d steps=16 "$@"
CUDA_VISIBLE_DEVICES=0 python -m dflash_ddp.bench pipeline workload=8b split=colocated steps=12 parts=false "$@"
python -m dflash_ddp.bench pipeline workload=8b split=colocated split.targets=2 split.drafters=2 steps=12 parts=false "$@"
