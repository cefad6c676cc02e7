"""Where a run's numbers go: `metrics.jsonl` always, wandb if asked, one console line for people. One rank writes.

What the keys of a row mean: `dflash_ddp.glossary`.
"""

import json
import logging
from pathlib import Path
from typing import Any

from dflash_ddp import glossary
from dflash_ddp.config import Config, Wandb
from dflash_ddp.panel import Panel, Setup, derived
from dflash_ddp.settings import resolved

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


def drop_rows_after(file: Path, step: int) -> None:
    """Before a resume: forget rows of steps that will be made again, and a half-written line."""
    if not file.is_file():
        return
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.endswith("}") and json.loads(line)["step"] <= step:
            kept.append(line + "\n")
    file.write_text("".join(kept), encoding="utf-8")


class RunLog:
    """The files and the wandb run of one training run."""

    def __init__(self, folder: Path, config: Config, setup: Setup, *, first_step: int) -> None:
        """Open `metrics.jsonl` at the step to go on from, wandb, and the panel."""
        # An evaluation at the step of a checkpoint is not made again, but one before all steps is.
        drop_rows_after(folder / METRICS_FILE, first_step if first_step > 0 else -1)
        self._file = (folder / METRICS_FILE).open("a", encoding="utf-8")
        self._setup, self._panel = setup, Panel(setup)
        self._wandb = start_wandb(folder, config)

    def write(self, row: dict[str, Any]) -> None:
        """One row; absent values are left out. Flushed, so that a killed run keeps it."""
        row = {key: value for key, value in row.items() if value is not None}
        row |= derived(row, self._setup)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._wandb is not None:
            self._wandb.log(row, step=row["step"])
        self._panel.show(row)

    def close(self, exit_code: int = 0) -> None:
        """Finish wandb; rows are on disk already."""
        self._panel.close()
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=exit_code)


def start_wandb(folder: Path, config: Config) -> Any:
    """The wandb run, or None if disabled or if it cannot start: training goes on without."""
    if config.logging.wandb is Wandb.disabled:
        return None
    import wandb

    try:
        run = wandb.init(
            project=config.logging.project,
            name=config.name,
            id=config.name.replace("/", "-"),
            dir=str(folder),
            mode=config.logging.wandb.value,
            config=resolved(config),
            resume="allow" if config.logging.wandb is Wandb.online else None,
            settings=wandb.Settings(console="off", silent=True),
        )
        glossary.define(run)
    except (wandb.errors.Error, OSError) as error:
        logger.warning("wandb does not start, metrics.jsonl has all rows: %s", error)
        return None
    return run
