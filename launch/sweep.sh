#!/usr/bin/env bash
# A sweep: one fresh torchrun for each combination, a folder each under outputs/<name>/, a table and a report at the end.
#   launch/sweep.sh name=lr_sweep optim.lr=3e-4,6e-4 ...     and the settings of the run itself
#   launch/sweep.sh name=splits sweep=split steps=100 ...
set -euo pipefail
exec python -m dflash_ddp.train --multirun "$@"
