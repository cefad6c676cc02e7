"""Sweeps: a fresh torchrun for each job, failures that stay alone, and what is said at the end."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from material import Material
from omegaconf import OmegaConf
from runs import all_rows, rows, run, running

from dflash_ddp import sweeps

pytestmark = pytest.mark.dist


def jobs(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "jobs.jsonl").read_text().splitlines()]


def words_of(material: Material, name: str, *more: str) -> list[str]:
    """A sweep of small runs of one process; what `more` sets is not set twice."""
    own = {word.split("=")[0] for word in more}
    common = [w for w in material.overrides(name, "split=colocated") if w.split("=")[0] not in own]
    return ["--multirun", *common, *more]


def test_a_failing_job_leaves_the_others_alone_and_all_are_compared(material):
    """Under torchrun. The first job's settings are refused, the others differ in learning rate."""
    more = ("optim.lr=-1,1e-3,2e-3", "steps=2", "eval.at_start=false")
    ended = run(2, words_of(material, "sweep", *more), limit_s=180, code=1)
    folder = material.output("sweep")
    assert [Path(job["folder"]).name for job in jobs(folder)] == [
        "optim.lr=-1",
        "optim.lr=0.001",
        "optim.lr=0.002",
    ]
    assert [job["code"] for job in jobs(folder)] == [2, 0, 0]
    assert ended.output.count("optim.lr=-1.0 must be > 0") == 1
    slow, fast = (folder / f"optim.lr={lr}" for lr in ("0.001", "0.002"))
    assert rows(slow)[0]["train/loss"] == rows(fast)[0]["train/loss"]
    assert rows(slow)[1]["train/loss"] != rows(fast)[1]["train/loss"]
    for job, run_folder in zip(jobs(folder)[1:], (slow, fast), strict=True):
        best = max(row.get("heldout/walk_on_text", 0) for row in all_rows(run_folder))
        assert job["values"]["heldout/walk_on_text"] == best
    table = ended.output[ended.output.index("accept length") :]
    assert table.index("optim.lr=0.00") < table.index("optim.lr=-1")
    assert "failed, code 2" in table
    report = (folder / "report.html").read_text()
    assert "optim.lr=0.001 | optim.lr=0.002" in report


def test_a_dry_run_checks_every_job(material):
    """Settings that are refused, text that is not there, and a job that would work."""
    texts = ",".join(str(material.folder / name) for name in ("nowhere.jsonl", "train.jsonl"))
    more = ("seed=-1,1", f"data.path={texts}")
    ended = run(None, words_of(material, "dry sweep", *more, "dry_run=true"), code=1)
    assert ended.output.count("seed=-1 must be >= 0") == 2
    assert ended.output.count("dry run: 1 problem; nothing was started") == 1
    assert ended.output.count("dry run: no problems; nothing was started") == 1
    assert [job["code"] for job in jobs(material.output("dry sweep"))] == [2, 2, 2, 0]
    table = ended.output[ended.output.index("accept length") :]
    assert (table.count("failed, code 2"), table.count(" ok")) == (3, 1)
    assert not list(material.output("dry sweep").glob("*/metrics.jsonl"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_sweep_that_is_told_to_end_ends_its_job_and_starts_no_other(material, number):
    """It says what came of the jobs so far, and which were not started."""
    name = f"told to end by {number.name}"
    words = words_of(material, name, "seed=-1,1,2,3", "steps=20000")
    metrics = material.output(name) / "seed=1" / "metrics.jsonl"
    with running(None, words) as command:
        command.wait_until(lambda: metrics.is_file() and "train/loss" in metrics.read_text(), 90)
        parent = min(command.pids())
        os.kill(parent, number)
        ended = command.wait(40)
        assert not command.pids()
    assert ended.code == 128 + number
    assert list((metrics.parent / "checkpoints").iterdir())
    assert not (material.output(name) / "seed=2").exists()
    assert [job["code"] for job in jobs(material.output(name))] == [2, 128 + number]
    text = ended.output[ended.output.index("accept length") :]
    table = [line.rstrip() for line in text.splitlines()]
    (stopped,) = (line for line in table if line.startswith("seed=1 "))
    assert re.search(rf" [\d.]+ .* stopped by {number.name}$", stopped)
    assert [line.endswith("failed, code 2") for line in table if line.startswith("seed=-1")] == [True]
    assert table[-1] == "not started: seed=2; seed=3"


def test_jobs_are_known_by_name_before_the_first_one_starts(monkeypatch):
    def planned(params: dict, *task: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["train", "--multirun", *task])
        hydra = {"sweeper": {"params": params}, "overrides": {"task": list(task)}}
        return sweeps.planned_jobs(OmegaConf.create({"hydra": hydra}))

    assert planned(None, "steps=2", "seed=1,2") == ["seed=1", "seed=2"]
    both = planned({"split": "7t1d,6t2d"}, "optim.lr=1e-3,2e-3", "name=x")
    assert both == [f"split={s},optim.lr={lr}" for s in ("7t1d", "6t2d") for lr in ("0.001", "0.002")]
    assert planned(None, "split=glob(*)") == []  # Hydra's own to know
    optuna = OmegaConf.create({"hydra": {"sweeper": {"n_trials": 2}}})
    assert sweeps.planned_jobs(optuna) == ["trial 1", "trial 2"]


def test_optuna_searches_for_the_highest_accept_length(material):
    """Three trials, the second of which cannot work."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    more = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.sampler.seed=1")
    more += ("steps=2", "eval.at_start=false", "optim.lr=choice(-1,1e-3,4e-3)")
    run(None, words_of(material, "optuna", *more), limit_s=240, code=None)
    folder = material.output("optuna")
    found = (folder / "optimization_results.yaml").read_text()
    best = max(job["values"].get("heldout/walk_on_text", 0) for job in jobs(folder))
    assert f"best_value: {best}" in found
    assert len(jobs(folder)) == 3


def test_a_job_is_named_by_what_is_swept_and_nothing_else(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train", "--multirun", "steps=2", "optim.lr=1,2", "name=x"])
    assert sweeps.job_name(["steps=2", "optim.lr=1", "name=x"], None) == "optim.lr=1"
    assert sweeps.job_name(["steps=2", "split=7t1d"], {"split": "7t1d,6t2d"}) == "split=7t1d"
    monkeypatch.setattr(sys, "argv", ["train", "-m", "target.path=a/b,c/d", "+seed=1,2"])
    name = sweeps.job_name(["target.path=a/b", "+seed=1"], None)
    assert re.fullmatch(r"target\.path=a_b,\+seed=1-[0-9a-f]{8}", name)
    assert sweeps.job_name(["steps=2"], None) == "job"


def test_the_name_of_a_folder_is_short_plain_and_distinct():
    texts = [
        *("data.path=/a/b", "data.path=_a_b", "data.path=../../b", "name=\u00e9", "x='a b'"),
        *(f"data.path={'x' * 300}{end}" for end in "ab"),
    ]
    names = [sweeps.folder_name(text) for text in texts]
    assert len(set(names)) == len(names)
    for name in names:
        assert re.fullmatch(r"[\w.,=+-]{3,80}", name, re.ASCII)


def test_a_job_does_not_inherit_an_outer_launcher(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & (
        sweeps.clean_environment().keys()
    )
