"""A run that is killed at random moments, again and again, ends as if nothing had happened.

`make test` kills a few times, `make soak` as often as SOAK_KILLS says; docs/failures.md has the last result.
"""

import json
import os
import random
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from ranks import Outcome, report, run_ranks
from runs import assert_equal_state, rows, state
from training import compose_config, train, train_rank

from dflash_ddp.control import Control

pytestmark = pytest.mark.dist

RUN = "split.targets=2 split.drafters=2 steps=30 eval.every=10 checkpoint.every=3 logging.every=4".split()
STEPS = 30
PACE_S = 0.03  # a step at least


def killed_rank(rank: int, config: object, victim: int, after_s: float) -> None:
    """A rank of a run in which one process, or all at once (-1), is killed after some seconds.

    They count from where the others know of it: who dies before is torchrun's to find, not theirs.
    """
    join = Control.__init__

    def joined(self: Control, *args: Any, **options: Any) -> None:
        join(self, *args, **options)
        if victim in (rank, -1):
            timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()

    Control.__init__ = joined
    train_rank(rank, config, {}, PACE_S)


def killed_run(config: object, victim: int, after_s: float) -> list[Outcome]:
    return run_ranks(killed_rank, 4, config, victim, after_s, check=False)


def soak(material, kills: int) -> dict[str, int]:
    """Kill so many times, in as many runs as that takes; each must equal the undisturbed one."""
    whole, chance = material.output("soak whole"), random.Random(0)
    train(4, material.overrides("soak whole", *RUN))
    outcomes = train(4, material.overrides("soak timed", *RUN), pace_s=PACE_S)  # no start of Python
    seconds = min(outcome.ended_s for outcome in outcomes)
    found = {"kills": 0, "starts": 0, "runs": 0, "in training": 0, "in a save": 0}
    while found["kills"] < kills:
        folder = material.output(f"soak {found['runs']}")
        config = compose_config(material.overrides(folder.name, *RUN))
        while not (folder / "export").exists() or newest(folder) < STEPS:
            victim = chance.choice([-1, 0, 1, 2, 2, 3])
            # A run that is killed before it has trained gains nothing: let most get that far.
            after_s = seconds * chance.uniform(0.2, 0.95) if found["kills"] < kills else 1e4
            outcomes = killed_run(config, victim, after_s)
            found["starts"] += 1
            if any(outcome.exit_code for outcome in outcomes):
                found["kills"] += 1
                found["in training"] += (folder / "checkpoints").exists()
                found["in a save"] += any((folder / "checkpoints").glob(".tmp-*"))
                ended = [outcome.ended_at for outcome in outcomes]
                assert max(ended) - min(ended) < 10, report(outcomes)
            else:  # the kill came too late: the machine is faster than when it was timed
                seconds = min(seconds, *(outcome.ended_s for outcome in outcomes))
            assert found["starts"] < 8 * kills + 20, report(outcomes)
        assert rows(folder) == rows(whole)
        assert_equal_state(state(folder, STEPS), state(whole, STEPS))
        exports = [(run / "export" / "model.safetensors").read_bytes() for run in (folder, whole)]
        assert exports[0] == exports[1]
        shutil.rmtree(folder)
        found["runs"] += 1
    return found


def newest(folder: Path) -> int:
    return max((int(p.name[-8:]) for p in (folder / "checkpoints").glob("step_*")), default=0)


def test_a_few_kills_change_nothing(material):
    assert soak(material, 3)["kills"] >= 3


@pytest.mark.soak
def test_many_kills_change_nothing(material):
    found = soak(material, int(os.environ.get("SOAK_KILLS", "100")))
    print(json.dumps(found))
