#!/usr/bin/env bash
# A sweep: one fresh torchrun for each combination, one directory each under outputs/<name>/.
#   launch/sweep.sh name=lr_sweep optim.lr=3e-4,6e-4
set -euo pipefail
exec python -m dflash_ddp.train --multirun "$@"
