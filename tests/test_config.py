"""Settings: every file composes, every mistake is refused with key, value and rule."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from dflash_ddp import settings
from dflash_ddp.config import Config, ConfigError, PositionWeight, Recompute, Wandb
from dflash_ddp.settings import override_problems, parse, problems, resolved
from dflash_ddp.train import CONF_DIR


def load(*overrides: str) -> Config:
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return parse(compose("train", list(overrides)))


def options(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF_DIR / group).glob("*.yaml"))


def test_no_argument_is_a_complete_run():
    config = load()
    assert config.target.path == "Qwen/Qwen3.6-27B"
    assert (config.split.targets, config.split.drafters) == (5, 3)
    assert config.world_size == 8
    assert config.batches_per_step == 3
    assert config.data.path == "HuggingFaceH4/ultrachat_200k"
    assert config.output_dir == "outputs/dev"
    assert config.logging.wandb is Wandb.offline


@pytest.mark.parametrize(
    ("group", "option"),
    [
        (group, option)
        for group in (
            "target",
            "drafter",
            "data",
            "split",
            "optim",
            "loss",
            "eval",
            "logging",
            "checkpoint",
            "experiment",
        )
        for option in options(group)
    ],
)
def test_every_file_composes(group, option):
    assert problems(load(f"{group}={option}")) == []


@pytest.mark.parametrize("option", options("sweep"))
def test_every_sweep_composes(option):
    load(f"sweep={option}")


def test_readme_and_files_state_the_same_defaults():
    """What the dataclasses default to is what the default files say, where both say it."""
    composed, plain = resolved(load()), resolved(Config())
    for group in ("optim", "loss", "eval", "logging", "checkpoint"):
        assert composed[group] == plain[group], group


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("+unknown=1", ["unknown=1", "no setting"]),
        ("+optim.lrr=1", ["optim.lrr=1", "did you mean optim.lr?"]),
        ("steps=0", ["steps=0", ">= 1"]),
        ("optim.lr=-1", ["optim.lr=-1", "> 0"]),
        ("optim.lr=nan", ["optim.lr", "> 0"]),
        ("loss.dpace_alpha=1.5", ["loss.dpace_alpha=1.5", "0..1"]),
        ("loss.position_gamma=0", ["loss.position_gamma=0", "> 0"]),
        ("optim.warmup_share=2", ["optim.warmup_share=2", "0..1"]),
        ("drafter.block_size=1", ["drafter.block_size=1", "2..128"]),
        ("tokens_per_batch=1000", ["tokens_per_batch=1000", "multiple of 128"]),
        ("data.max_length=50000", ["data.max_length=50000", "tokens_per_batch=49152"]),
        ("batches_per_step=4", ["batches_per_step=4", "split.drafters=3"]),
        ("drafter.sliding_layers=6", ["drafter.sliding_layers=6", "drafter.num_layers=5"]),
        ("target.capture_layers=[3,1]", ["target.capture_layers=[3, 1]", "ascending"]),
        ("split.colocated=true", ["split.targets=5", "split.drafters=3"]),
        ("name=../x", ["name='../x'", "plain name"]),
        ("name=/x", ["name='/x'", "plain name"]),
        ("name=a/../../x", ["name='a/../../x'", "plain name"]),
        ("name=.", ["name='.'", "plain name"]),
        ("name=" + "x" * 201, ["plain name, 200 bytes at most"]),
        ("name='" + "\u00e9" * 101 + "'", ["plain name, 200 bytes at most"]),
        ("name='a\nb'", [r"name='a\nb'", "plain name"]),
        ("output_dir=.", ["output_dir='.'", "a folder of the run's own"]),
        ("output_dir=..", ["output_dir='..'", "a folder of the run's own"]),
        ("data.path=s3://me:hunter2@bucket/x", ["data.path=s3://***@bucket/x", "credential"]),
        ("logging.project=hf_abcdefghijklmnopqrst", ["logging.project=***", "credential"]),
        ("target.path=???", ["target.path"]),
        ("resume=", ["resume= must be auto, none or a checkpoint's folder"]),
        ("resume=' '", ["resume=  must be auto, none or a checkpoint's folder"]),
        ("drafter.init_from=", ["drafter.init_from= must not be empty"]),
        ("data.cache_dir=", ["data.cache_dir= must not be empty"]),
    ],
)
def test_mistakes_are_refused_with_key_value_and_rule(override, words):
    with pytest.raises(ConfigError) as refused:
        load(override)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    "override",
    ["optim.lrr=1", "steps=abc", "loss.recompute=foo", "logging.wandb=maybe", "steps=1e3"],
)
def test_typos_and_wrong_types_do_not_compose(override):
    with pytest.raises(Exception, match=override.split("=")[0].split(".")[-1]):
        load(override)


def test_nothing_that_a_run_reads_lies_where_it_moves_things_aside():
    for key in ("data.cache_dir", "data.heldout", "target.path"):
        override = f"{key}=outputs/dev/x"
        load(override)
        with pytest.raises(ConfigError, match=f"{key}=outputs/dev/x must not lie in output_dir"):
            load(override, "resume=none")
        load(f"{key}=outputs/devx", "resume=none")


OVERRIDES = {
    "optim.lrr=1": "optim.lrr=1 is no setting; did you mean optim.lr?",
    "+optim.lrr=1": "optim.lrr=1 is no setting; did you mean optim.lr?",
    "++optmi.lr=1": "optmi.lr=1 is no setting; did you mean optim.lr?",
    "lr=1e-3": "lr=1e-3 is no setting; did you mean optim.lr?",
    "path=x": "path=x is no setting; did you mean target.path or data.path?",
    "drafter.blocksize=8": "did you mean drafter.block_size?",
    "data.max_len=8": "did you mean data.max_length?",
    "+unknown=1": "unknown=1 is no setting",
    "+data.pth=/x": "did you mean data.path?",
    "+wandb_api_key=abc": "wandb_api_key=*** holds a credential",
    "data.path=s3://me:hunter2@b/x": "data.path=s3://***@b/x holds a credential",
}


@pytest.mark.parametrize("override", OVERRIDES)
def test_a_mistyped_key_is_one_message_with_or_without_plus(override):
    (problem,) = override_problems([override])
    assert problem.startswith(OVERRIDES[override]) or problem.endswith(OVERRIDES[override])


def test_right_words_are_left_to_hydra():
    words = "optim.lr=1 +optim.lr=1 optim=adamw experiment=demo sweep=lr hydra.run.dir=. ~optim.lr"
    words += " hydra/launcher=basic +optim@x=adamw seed=1,2 target.capture_layers=[1,2] steps"
    assert override_problems(words.split()) == []


@pytest.mark.parametrize(
    "path", ["/d/run=1/a,b (2).jsonl", "/d/[x]/{y}.jsonl", "/donn\u00e9es/\u6771.jsonl"]
)
def test_a_quoted_path_may_hold_any_sign(path):
    assert load(f'data.path="{path}"').data.path == path
    assert override_problems([f'data.path="{path}"']) == []


SWEEP = """
import json, subprocess, sys
class Recorded:
    def __init__(self, command, env, start_new_session):
        print(json.dumps(command))
    def wait(self):
        return 1
subprocess.Popen = Recorded
from dflash_ddp.train import start
sys.argv[1:] = {words}
start()
"""


def test_jobs_of_a_sweep_have_names_and_folders_of_their_own(tmp_path):
    """Also if the swept value is a path upwards: nothing is written but below outputs/."""
    (tmp_path / "cwd").mkdir()
    texts = f"data.path='../../x.jsonl','{'y' * 300}.jsonl'"
    words = ["--multirun", "name=it's", "optim.lr=1e-3,2e-3", texts]
    code = SWEEP.format(words=[w.replace("it's", r"'it\'s'") for w in words])
    env = os.environ | {"PYTHONPATH": str(CONF_DIR.parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "cwd",
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1  # all jobs have failed
    jobs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    configs = [load(*job[job.index("dflash_ddp.train") + 1 :]) for job in jobs]
    assert len({config.name for config in configs}) == len(configs) == 4
    assert {config.optim.lr for config in configs} == {1e-3, 2e-3}
    for config in configs:
        assert config.output_dir == str(tmp_path / "cwd" / "outputs" / config.name)
        assert re.fullmatch(r"it's/optim\.lr=\S+", config.name)
    files = sorted(str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*") if f.is_file())
    assert files == [f"cwd/outputs/it's/{name}" for name in ("jobs.jsonl", "multirun.yaml")]


def test_all_problems_are_named_at_once():
    with pytest.raises(ConfigError) as refused:
        load("steps=0", "optim.lr=0", "tokens_per_batch=100")
    assert len(str(refused.value).splitlines()) >= 3


def test_choices_are_written_as_documented():
    assert load("loss.recompute=non_reentrant").loss.recompute is Recompute.non_reentrant
    assert load("loss.recompute=none").loss.recompute is Recompute.none
    assert load("loss=dpace").loss.position_weight is PositionWeight.dpace
    assert resolved(load())["logging"]["wandb"] == "offline"


def test_settings_are_checked_before_torch_is_loaded():
    code = "import sys, dflash_ddp.config, dflash_ddp.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_field_is_documented():
    tree = ast.parse(Path(sys.modules[Config.__module__].__file__).read_text())
    classes = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name.endswith("Config")]
    undocumented = [
        f"{node.name}.{field.target.id}"
        for node in classes
        for field, after in zip(node.body, [*node.body[1:], None], strict=True)
        if isinstance(field, ast.AnnAssign)
        and not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
        and field.target.id
        not in {f.removesuffix("Config").lower() for f in (c.name for c in classes)}
    ]
    assert undocumented == []
    assert len(classes) == 11


@pytest.mark.parametrize("installed", [None, object()])
def test_a_sweeper_that_is_not_installed_comes_with_how_to_install_it(monkeypatch, installed):
    monkeypatch.setattr(settings, "find_spec", lambda _: installed)
    found = override_problems(["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "seed=1,2"])
    hint = "hydra/sweeper=optuna is not installed: pip install -e '.[optuna]'"
    assert found == ([hint] if installed is None else [])
