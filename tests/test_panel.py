"""The console: what a row says, when advice is given and that it is right, and what a terminal receives."""

import io
import logging

import pytest

from dflash_ddp import glossary, panel
from dflash_ddp.panel import LINES, PATIENCE, Panel, Setup, advise, block, derived, duration, line


def setup(**changed) -> Setup:
    values = {
        "steps": 1000,
        "targets": 5,
        "drafters": 3,
        "colocated": False,
        "num_anchors": 2048,
        "batches_per_step": 3,
        "target_flops": 48e9,
        "drafter_flops": 500e12,
        "fixed_share": 0.2,
        "peak_flops": 989e12,
    }
    return Setup(**(values | changed))


def row(step=10, target=0.0, drafter=0.0, **more):
    return {
        "step": step,
        "speed/step_s": 2.0,
        "speed/tokens_per_s": 50_000.0,
        "wait/target": 2 * target,
        "wait/drafter": 2 * drafter,
        **more,
    }


def test_shares_are_of_the_step_and_of_all_ranks_of_the_role():
    found = derived(row(target=0.1, drafter=0.3), setup())
    assert found["wait/target_share"] == pytest.approx(0.1)
    assert found["wait/drafter_share"] == pytest.approx(0.3)
    assert found["speed/mfu_target"] == pytest.approx(50_000 * 48e9 / (5 * 989e12))
    assert found["speed/mfu_drafter"] == pytest.approx(3 / 2.0 * 500e12 / (3 * 989e12))
    assert not [key for key in derived(row(), setup(peak_flops=None)) if "mfu" in key]
    assert derived(row(), setup(colocated=True)).keys() == {"speed/mfu_target", "speed/mfu_drafter"}
    assert derived({"step": 3}, setup()) == {}


def simulate(targets: int, drafters: int, target_s: float, drafter_s: float):
    """Rate and waits of a pipeline whose slower role never waits: the model that advice rests on."""
    rate = min(targets / target_s, drafters / drafter_s)
    return rate, (1 - rate * target_s / targets, 1 - rate * drafter_s / drafters)


@pytest.mark.parametrize(("target_s", "drafter_s"), [(1.0, 0.2), (0.3, 1.0), (1.0, 0.1)])
def test_the_gain_that_advice_names_is_the_one_that_the_move_brings(target_s, drafter_s):
    before, waits = simulate(5, 3, target_s, drafter_s)
    text = advise(setup(), waits)
    targets, drafters = (6, 2) if waits[1] > waits[0] else (4, 4)
    after, _ = simulate(targets, drafters, target_s, drafter_s)
    gain = f"split.targets={targets} split.drafters={drafters} would give {after / before - 1:+.0%}"
    assert gain in text


@pytest.mark.parametrize(("target_s", "drafter_s"), [(1.0, 0.3), (0.6, 1.2)])
def test_with_the_anchors_that_advice_names_nobody_waits(target_s, drafter_s):
    text = advise(setup(), simulate(5, 3, target_s, drafter_s)[1])
    anchors = int(text.split("drafter.num_anchors=")[1].split()[0])
    then_s = drafter_s * (0.2 + 0.8 * anchors / 2048)
    assert simulate(5, 3, target_s, then_s)[1] == pytest.approx((0, 0), abs=2e-3)


def test_no_advice_without_need_and_no_split_without_ranks():
    assert advise(setup(), (0.2, 0.1)) is None
    assert advise(setup(colocated=True), (0.9, 0.0)) is None
    assert "split" not in advise(setup(targets=1, drafters=1), (0.0, 0.5))


def test_advice_is_given_once_and_only_after_some_rows(caplog):
    caplog.set_level(logging.INFO, "dflash_ddp")
    shown = Panel(setup(), io.StringIO())
    for step in range(1, 2 * PATIENCE):
        waiting = row(step, drafter=0.5)
        shown.show(waiting | derived(waiting, setup()))
        advice = [r.message for r in caplog.records if r.message.startswith("advice")]
        assert len(advice) == (step >= PATIENCE)
    assert "drafters wait 50% of the time" in advice[0]


def test_a_line_says_what_the_row_has_and_nothing_else():
    text = line({"step": 10, "train/loss": 3.25, "heldout/accept_length": 1.5}, setup(), 3700)
    assert text == "step 10/1000  loss 3.2500  held-out accept 1.500  ETA 1 h 1 min"
    assert [duration(s) for s in (5, 65, 90_000)] == ["5 s", "1 min 5 s", "1 d 1 h"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_panel_in_lines_of_its_own_and_gets_them_back(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "30")
    stream = Terminal()
    shown = Panel(setup(), stream)
    for step in (10, 20):
        shown.show(row(step, **{"train/loss": 2.5}))
    text = stream.getvalue()
    assert text.count(f"\x1b[1;{30 - LINES}r") == 1, "the log scrolls above the panel"
    assert text.count("\x1b7") == text.count("\x1b8") == 2, "the cursor goes back to the log"
    assert "step 20/1000" in text
    assert max(len(part.split("\x1b")[0]) for part in text.split("\x1b[2K")[1:]) <= 40
    shown.close()
    assert "\x1b[r" in stream.getvalue()[len(text) :]
    shown.close()
    monkeypatch.setenv("TERM", "dumb")
    plain = Terminal()
    Panel(setup(), plain).show(row())
    assert plain.getvalue() == ""


def test_the_panel_has_always_as_many_lines_and_keeps_the_last_value_of_each_key():
    values = row(
        500, **{"train/loss": 2.0, "heldout/accept_length": 1.75, "memory/target_gib": 53.9}
    )
    lines = block(values, setup(), 60.0, "do this; or that")
    assert len(lines) == len(block({"step": 0}, setup(), None, None)) == LINES
    assert "held-out accept 1.750" in "".join(lines)
    assert "50.0%" in lines[1]
    assert lines[-2:] == ["advice: do this", "        or that"]


def test_everything_shown_is_in_the_glossary():
    for key, _ in panel.FIELDS:
        assert glossary.find(key) is not None, key
    assert glossary.find("train/slot_12").key == "train/slot_k"
    assert glossary.find("train/unknown") is None
    for metric in glossary.METRICS:
        assert metric.best in ("max", "min", "last")


def test_wandb_hears_of_every_metric_once_with_step_as_axis():
    defined = {}

    class Run:
        def define_metric(self, name, **settings):
            assert name not in defined
            defined[name] = settings

    glossary.define(Run())
    assert defined.pop("step") == {"hidden": True}
    assert {name.replace("*", "k") for name in defined} == {m.key for m in glossary.METRICS[1:]}
    assert {settings["step_metric"] for settings in defined.values()} == {"step"}
    assert defined["train/loss"]["summary"] == "min"
    assert defined["heldout/accept_length"]["summary"] == "max"
