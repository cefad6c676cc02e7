"""wandb that does not start, fails or hangs: the run goes on, and metrics.jsonl has all rows."""

import os
import threading
from functools import partial

import pytest
from ranks import report
from runs import rows
from training import train

import dflash_ddp.runlog

pytestmark = pytest.mark.dist

DRAFTER = 1


class Failing:
    """A wandb run whose calls fail or hang."""

    def log(self, *_args: object, **_options: object) -> None:
        raise TypeError("the dog ate it")

    def finish(self, **_options: object) -> None:
        threading.Event().wait()


class Hanging(Failing):
    def log(self, *_args: object, **_options: object) -> None:
        pass


def start(run: type[Failing]) -> None:
    dflash_ddp.runlog.start_wandb = lambda *_: run()
    dflash_ddp.runlog.FINISH_S = 0.3


def set_variable(text: str) -> None:
    os.environ.update([text.split("=")])


CASES = {
    "WANDB_BASE_URL=nohost": "wandb does not start, metrics.jsonl has all rows: ",
    "WANDB_MODE=of": "wandb does not start, metrics.jsonl has all rows: ",
    "fails": "wandb has failed, metrics.jsonl goes on: the dog ate it",
    "hangs": "wandb has not finished in 0 s: `wandb sync` sends what lies in wandb/",
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_needs_no_wandb(material, case):
    event = partial(set_variable, case)
    if "=" not in case:
        event = partial(start, {"fails": Failing, "hangs": Hanging}[case])
    split = ["split=1t1d", "steps=3", "eval.every=0", "eval.at_start=false", "logging=offline"]
    events = {(DRAFTER, "build drafter", 1): event}
    name = f"wandb {case.partition('=')[0]}"
    outcomes = train(2, material.overrides(name, *split), events)
    assert CASES[case] in outcomes[DRAFTER].output, report(outcomes)
    assert "steps=3 " in outcomes[DRAFTER].output
    made = [row["step"] for row in rows(material.output(name)) if "train/loss" in row]
    assert made == [1, 2, 3]
