"""The real program of a rank, in processes that `ranks` forks: a small run takes a second or two.

In: overrides, and what shall happen to which rank in which phase. Out: an `Outcome` a rank.
"""

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable

import torch
import transformers.models.qwen3.modeling_qwen3  # noqa: F401 (for the fork server, as what follows)
from hydra import compose, initialize_config_dir
from ranks import Outcome, run_ranks

import dflash_ddp.drafter.worker
import dflash_ddp.startup
import dflash_ddp.stopping
import dflash_ddp.target.worker  # noqa: F401
from dflash_ddp.channel import Received
from dflash_ddp.config import Config
from dflash_ddp.control import Control
from dflash_ddp.drafter.intake import Intake
from dflash_ddp.settings import parse
from dflash_ddp.train import CONF_DIR, run_rank

Events = dict[tuple[int, str, int], int | str | Callable[[], object]]
"""(rank, first words of a phase, n) -> what happens when the rank enters such a phase for the n-th
time: a signal that it sends itself, or "oom", "raise",
"SIGTERM twice", or a call. For "forward item": with the first item from
n on, since nobody knows which target takes which."""


def train_rank(rank: int, config: Config, events: Events, pace_s: float) -> None:
    """`python -m dflash_ddp.train` as torchrun starts it."""
    enter, seen = Control.phase, Counter()

    def phase(self: Control, text: str) -> None:
        enter(self, text)
        for (who, words, n), event in list(events.items()):
            if who == rank and text.startswith(words):
                seen[words, n] += 1
                if (int(text.split()[-1]) if words == "forward item" else seen[words, n]) >= n:
                    del events[who, words, n]
                    happen(event)
                    break
        if text.startswith("train step"):
            time.sleep(pace_s)

    Control.phase = phase
    run_rank(config)


def die() -> None:
    """Killed when all ranks know what this one does."""
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def poison(value: float, times: int) -> None:
    """The next features of this rank hold values that are not finite; the slot keeps the last one."""
    whole, left = Intake.tensor, [times]

    def tensor(self: Intake, received: Received) -> torch.Tensor:
        features_SC = whole(self, received)
        if left[0]:
            left[0] -= 1
            features_SC[[0, received.header.num_tokens - 1], 0] = value
        return features_SC

    Intake.tensor = tensor


def happen(event: int | str | Callable[[], object]) -> None:
    """Do to this process what the event says."""
    sys.stderr.write(f"happens at {time.monotonic()}\n")
    sys.stderr.flush()
    if event == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
    if event == "raise":
        raise ValueError("the dog ate it")
    if event == "SIGTERM twice":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.3)
        event = signal.SIGTERM
    if callable(event):
        event()
        return
    assert isinstance(event, int)
    os.kill(os.getpid(), event)


def compose_config(overrides: list[str]) -> Config:
    """Settings, composed once for all ranks: that takes longer than a small run."""
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return parse(compose("train", overrides))


def train(
    num_ranks: int,
    overrides: list[str],
    events: Events | None = None,
    *,
    pace_s: float = 0.0,
    **options: object,
) -> list[Outcome]:
    """A run of so many ranks, each step at least `pace_s` long; `options` as in `run_ranks`."""
    config = compose_config(overrides)
    return run_ranks(train_rank, num_ranks, config, events or {}, pace_s, **options)
