"""Where a run's numbers go: `metrics.jsonl` always, wandb if asked, one console line for people. One rank writes.

What the keys of a row mean: `dflash_ddp.glossary`.
"""

import atexit
import json
import logging
import math
import os
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dflash_ddp import glossary
from dflash_ddp.config import Config, Wandb
from dflash_ddp.folder import OwnFolder
from dflash_ddp.metrics_file import (
    METRICS_FILE,
    RowFile,
    drop_rows_after,
    missing_steps,
    read_rows,
)
from dflash_ddp.panel import Panel, Setup, derived
from dflash_ddp.settings import resolved

logger = logging.getLogger(__name__)

FINISH_S = 60.0
"""wandb may take so long at the end of a run to send what it has."""
AFTER_STOP_S = 8.0
"""The same where a launcher or a scheduler may be waiting for the end."""


class RunLog:
    """The files and the wandb run of one training run."""

    def __init__(self, own: OwnFolder, config: Config, setup: Setup, *, first_step: int) -> None:
        """Open `metrics.jsonl` at the step to go on from, wandb, and the panel."""
        own.check()
        # An evaluation at the step of a checkpoint is not made again, but one before all steps is.
        drop_rows_after(own.path, first_step if first_step > 0 else -1)
        if first_step > 0:
            tell_missing(own.path, first_step, config.logging.every)
        self._file = RowFile(own.path / METRICS_FILE, own.keep)
        self._setup, self._panel = setup, Panel(setup)
        self._wandb = start_wandb(own.path, config)

    def write(self, row: dict[str, Any]) -> None:
        """One row; absent and non-finite values are left out. A killed run keeps it."""
        row = {k: v for k, v in row.items() if v is not None and math.isfinite(v)}
        row |= derived(row, self._setup)
        self._file.append(json.dumps(row))
        self._to_wandb(lambda run: run.log(row, step=row["step"]))
        self._panel.show(row)

    def close(self, exit_code: int = 0, limit_s: float = FINISH_S) -> None:
        """Finish wandb, or go on without after a while; rows are on disk already."""
        self._panel.close()
        finish = partial(self._to_wandb, lambda run: run.finish(exit_code=exit_code))
        finishing = threading.Thread(target=finish, name="wandb", daemon=True)
        finishing.start()
        finishing.join(limit_s)
        if finishing.is_alive():
            self._wandb = None
            logger.warning(
                "wandb has not finished in %.0f s: `wandb sync` sends what lies in wandb/", limit_s
            )
            atexit.register(os._exit, exit_code)  # before wandb's own hook, which would wait again

    def _to_wandb(self, send: Callable[[Any], object]) -> None:
        """Its failure never ends training: metrics.jsonl has all rows."""
        if self._wandb is None:
            return
        try:
            send(self._wandb)
        except Exception as error:  # noqa: BLE001 (of wandb, pydantic, protobuf, the network)
            self._wandb = None
            logger.warning("wandb has failed, metrics.jsonl goes on: %s", error)


def tell_missing(folder: Path, step: int, every: int) -> None:
    """At a resume: which steps metrics.jsonl does not tell of, as after someone deleted it; one line."""
    if gaps := missing_steps(read_rows(folder), step, every):
        shown = [f"{first}-{last}" if first < last else f"{last}" for first, last in gaps[:5]]
        logger.warning(
            "%s has no row of steps %s, which are not trained again: curves have a gap there",
            folder / METRICS_FILE,
            ", ".join(shown) + ("" if len(gaps) <= 5 else f" and {len(gaps) - 5} more gaps"),
        )


def start_wandb(folder: Path, config: Config) -> Any:
    """The wandb run, or None if disabled or if it cannot start: training goes on without."""
    if config.logging.wandb is Wandb.disabled:
        return None
    try:
        import wandb

        run = wandb.init(
            project=config.logging.project,
            name=config.name,
            id=re.sub(r"[:;,#?%/\\']", "-", config.name)[-128:],
            dir=str(folder),
            mode=config.logging.wandb.value,
            config=resolved(config),
            resume="allow" if config.logging.wandb is Wandb.online else None,
            settings=wandb.Settings(console="off", silent=True),
        )
        glossary.define(run)
    except Exception as error:  # noqa: BLE001 (a bad WANDB_ variable is pydantic's)
        logger.warning("wandb does not start, metrics.jsonl has all rows: %s", error)
        return None
    return run


class Summary(NamedTuple):
    """What a finished run says in one line."""

    steps: int
    loss: float | None
    accept_length: float | None
    untrained_accept_length: float | None
    tokens_per_s: float
    best_step: int | None
    export: str | None
    stopped_by: str | None

    def text(self, *, generated: bool) -> str:
        """`key=value` pairs in one line; a walk over text that the target did not write is named so."""
        name = "accept_length" if generated else "walk_on_text"
        shown = {
            key.replace("accept_length", name): f"{value:.4f}"
            if isinstance(value, float)
            else value
            for key, value in self._asdict().items()
            if value is not None
        }
        return " ".join(f"{key}={value}" for key, value in shown.items())
