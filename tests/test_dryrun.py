"""A dry run finds what a run would meet, names all of it, and leaves nothing behind."""

import json

import pytest
from runs import run
from targets import build_target
from training import compose_config, train

from dflash_ddp import dryrun
from dflash_ddp.config import ConfigError
from dflash_ddp.facts import LEVERS
from dflash_ddp.plan import load_config
from dflash_ddp.train import check_only


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return build_target("qwen3_sharded", tmp_path_factory.mktemp("target"))


def overrides(target, folder, *more):
    turns = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Because it is."},
    ]
    (folder / "text.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    return [
        *("experiment=demo", f"target.path={target}", f"data.path={folder / 'text.jsonl'}"),
        *(
            "data.heldout=null",
            f"output_dir={folder / 'run'}",
            f"data.cache_dir={folder / 'cache'}",
        ),
        *more,
    ]


def found(target, folder, *more):
    return list(dryrun.dry_run(load_config(overrides(target, folder, *more))))


@pytest.mark.dist
def test_the_command_checks_and_starts_nothing(target, tmp_path):
    words = overrides(target, tmp_path, "dry_run=true", "split=1t1d")
    ended = run(2, words)
    assert ended.output.count("dry run: no problems; nothing was started") == 1
    assert {file.name for file in tmp_path.iterdir()} == {"text.jsonl"}


def test_every_problem_is_named(target, tmp_path):
    (tmp_path / "empty.jsonl").write_text("{}\n")
    wrong = [
        f"data.path={tmp_path / 'empty.jsonl'}",
        "data.heldout=nowhere.jsonl",
        "output_dir=/proc/run",
    ]
    texts = [text for right, text in found(target, tmp_path, *wrong) if not right]
    assert len(texts) == 3
    assert "output_dir=/proc/run: cannot write" in texts[0]
    assert "empty.jsonl:1: no 'messages'" in texts[1]
    assert "nowhere.jsonl: there is no such file" in texts[2]


def test_what_several_checks_meet_is_named_once(tmp_path):
    settings = [
        "target.path=nowhere",
        "drafter=like_target",
        "data.path=x",
        "data.heldout=y",
        "device=cpu",
    ]
    texts = [text for right, text in dryrun.dry_run(load_config(settings)) if not right]
    assert len(texts) == len(set(texts)) >= 2


@pytest.mark.parametrize(("device", "gpus"), [("auto", 0), ("cuda", 0), ("cpu", 0), ("auto", 1)])
def test_problems_of_a_machine_without_gpus_say_where_to_check(
    target, tmp_path, monkeypatch, capsys, device, gpus
):
    monkeypatch.setattr(dryrun.torch.cuda, "is_available", lambda: bool(gpus))
    monkeypatch.setattr(dryrun, "dry_run", lambda _: [(False, "dense attention ...")])
    with pytest.raises(ConfigError) as refused:
        check_only(load_config(overrides(target, tmp_path, f"device={device}")))
    assert str(refused.value).startswith("dry run: 1 problem; nothing was started")
    told = "check a GPU job on a machine with its GPUs" in str(refused.value)
    assert told == (device != "cpu" and not gpus)
    assert capsys.readouterr().out == "WRONG dense attention ...\n"


def test_a_missing_shard_is_named(tmp_path):
    folder = build_target("qwen3_sharded", tmp_path / "target")
    shard = sorted(folder.glob("model-*.safetensors"))[-1]
    shard.unlink()
    right, text = found(folder, tmp_path)[0]
    assert not right
    assert f"[{shard.name!r}] are missing" in text


def test_memory_that_is_not_there_comes_with_what_to_lower(target, tmp_path, monkeypatch):
    monkeypatch.setattr(dryrun, "device_type", lambda _: "cuda")
    monkeypatch.setattr(dryrun.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dryrun.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(dryrun.torch.cuda, "mem_get_info", lambda _: (0, 4 * 2**20))
    (text,) = (text for right, text in found(target, tmp_path) if "memory" in text and not right)
    for key, _ in LEVERS["drafter"]:
        assert f"{key}=" in text


def test_a_run_that_would_go_on_keeps_what_is_half_written(target, tmp_path):
    half = tmp_path / "run" / "checkpoints" / ".tmp-step_00000006"
    half.mkdir(parents=True)
    assert all(right for right, _ in found(target, tmp_path, "resume=auto"))
    assert half.is_dir()


@pytest.mark.dist
def test_whether_the_run_that_is_there_can_go_on(material):
    overrides = [
        *material.overrides("dry"),
        "split=colocated",
        "split.targets=1",
        "split.drafters=1",
    ]
    train(1, [*overrides, "steps=3"])
    folder = material.output("dry") / "checkpoints"

    def resume(*more):
        checks = list(dryrun.dry_run(compose_config([*overrides, *more])))
        return checks[0]

    right, text = resume("steps=3")
    assert right
    assert f"would go on from {folder / 'step_00000003'}" in text
    right, text = resume("steps=4", "optim.lr=1e-3")
    assert not right
    assert "steps: 3 in the checkpoint, 4 now" in text
    assert "optim.lr: 0.002 in the checkpoint, 0.001 now" in text
    right, text = resume("steps=3", "resume=none")
    assert right
    assert "a new run" in text
    right, text = resume("steps=3", f"resume={folder}")
    assert not right
    assert "holds checkpoints; give one of them" in text
