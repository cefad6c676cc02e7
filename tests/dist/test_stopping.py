"""A run that is told to stop or to save: all ranks agree on the step, and what goes on is the same run."""

import signal

import pytest
from ranks import report
from runs import assert_equal_state, rows, state
from training import train

pytestmark = pytest.mark.dist

STEPS = 12
SPLIT = "split.targets=2 split.drafters=2 checkpoint.every=0 logging.every=4".split()
SPLIT += ["steps=12", "eval.every=5", "checkpoint.export=last"]


@pytest.fixture(scope="session")
def whole(material):
    """An undisturbed run: rows at 4, 5 (an evaluation), 8, 10, 12, one checkpoint at the end."""
    train(4, material.overrides("whole", *SPLIT))
    return material.output("whole")


def checkpoints(folder):
    return sorted(int(p.name[-8:]) for p in (folder / "checkpoints").iterdir())


STOPS = {
    "one target": {(1, "forward item", 14): signal.SIGTERM},
    "one drafter": {(3, "train step", 2): signal.SIGINT},
    "all": {(r, "train step" if r > 1 else "forward item", 2 if r > 1 else 14): signal.SIGTERM for r in range(4)},
    "in an evaluation": {(2, "evaluate at step 5", 1): signal.SIGTERM},
    "in the first step": {(2, "train step 0", 1): signal.SIGTERM},
    "in a save": {(2, "save step 3", 1): signal.SIGTERM},
}


@pytest.mark.parametrize("case", STOPS)
def test_a_signal_stops_all_at_one_step_and_the_run_goes_on_exactly(material, whole, case):
    name = f"stopped {case}"
    folder = material.output(name)
    more = ["checkpoint.every=3", "checkpoint.keep_last=1"] if case == "in a save" else []
    outcomes = train(4, material.overrides(name, *SPLIT, *more), STOPS[case], pace_s=0.2)
    (step,) = checkpoints(folder)
    assert 0 < step < STEPS, report(outcomes)
    assert f"stopped after {step} of {STEPS} steps" in outcomes[2].output, report(outcomes)
    assert f"dev: steps={step} " in outcomes[2].output
    assert "stopped_by=SIG" in outcomes[2].output
    assert all("the job ends" not in outcome.output for outcome in outcomes)
    if case == "all":
        train(4, material.overrides(name, *SPLIT))
        assert rows(folder) == rows(whole)
        assert_equal_state(state(folder, STEPS), state(whole, STEPS))


def test_sigusr1_saves_and_goes_on(material, whole):
    folder = material.output("saved")
    events = {(0, "forward item", 14): signal.SIGUSR1}
    outcomes = train(4, material.overrides("saved", *SPLIT), events, pace_s=0.2)
    steps = checkpoints(folder)
    assert len(steps) == 2, report(outcomes)
    assert 0 < steps[0] < steps[1] == STEPS
    assert "stopped_by" not in outcomes[2].output
    assert rows(folder) == rows(whole)
    assert_equal_state(state(folder, STEPS), state(whole, STEPS))


def test_sigusr1_before_training_is_no_reason_to_end(material):
    events = {(rank, "preflight", 1): signal.SIGUSR1 for rank in range(2)}
    train(2, material.overrides("early", "split=1t1d", "steps=2"), events)


def test_colocated_ranks_stop_alike(material):
    events = {(1, "train step", 3): signal.SIGTERM}
    split = "split=colocated split.targets=2 split.drafters=2 steps=40 eval.every=0".split()
    outcomes = train(2, material.overrides("colocated stop", *split), events, pace_s=0.1)
    assert "SIGTERM at rank 1 (colocated): stopped after " in outcomes[0].output, report(outcomes)
    assert max(checkpoints(material.output("colocated stop"))) < 40


def test_max_hours_stops_like_a_signal(material):
    overrides = material.overrides("limit", *SPLIT, "steps=100000", "eval.every=0", "max_hours=0.003")
    outcomes = train(4, overrides)
    (step,) = checkpoints(material.output("limit"))
    assert f"max_hours=0.003: stopped after {step} of 100000 steps" in outcomes[2].output
    assert 10.8 < max(outcome.ended_s for outcome in outcomes) < 45


@pytest.mark.parametrize(
    ("phase", "text"),
    [
        ("connect", "SIGTERM at rank 0 (target) before training began: there is nothing to save"),
        ("train step", "a second SIGTERM at rank 2 (drafter): the run ends at once"),
    ],
)
def test_nothing_to_save_or_a_second_signal_ends_at_once(material, phase, text):
    rank = 2 if phase.startswith("train") else 0
    events = {(rank, phase, 1): "SIGTERM twice"}
    overrides = material.overrides("at once", *SPLIT, "steps=100000", "eval.every=0")
    outcomes = train(4, overrides, events, pace_s=0.1, check=False)
    assert {outcome.exit_code for outcome in outcomes} == {13}, report(outcomes)
    assert any(text in outcome.output for outcome in outcomes), report(outcomes)
    assert max(outcome.ended_s for outcome in outcomes) < 20
