"""What rank 0 finds before a weight is loaded: each with key and rule, and with nothing changed."""

import json
import multiprocessing
import shutil
import sys
from pathlib import Path

import pytest
from targets import build_target
from test_config import load

from dflash_ddp.checkpoint import STATE_FILE
from dflash_ddp.config import Config, ConfigError
from dflash_ddp.folder import claim_folder, claimed_by, hold_folder
from dflash_ddp.preflight import preflight

FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return build_target("qwen3_untied", tmp_path_factory.mktemp("target"))


@pytest.fixture
def copy(target, tmp_path) -> Path:
    return Path(shutil.copytree(target, tmp_path / "target"))


def settings(target: Path, *more: str) -> Config:
    """A small run on a CPU in `run`, next to the target."""
    small = "experiment=demo device=cpu drafter.num_layers=2 resume=auto".split()
    return load(*small, f"target.path={target}", f"output_dir={target.parent / 'run'}", *more)


def refusal(config: Config) -> str:
    with pytest.raises(ConfigError) as refused:
        preflight(config)
    return str(refused.value)


def test_a_complete_run_passes(target):
    found = preflight(settings(target))
    assert (len(found.capture_layers), found.mask_token_id) == (2, 259)
    assert (found.checkpoint, found.first_step) == (None, 0)


def test_dense_attention_beyond_its_limit_is_found_before_the_target_is_read(tmp_path):
    large = ["drafter.num_anchors=2048", "drafter.block_size=16", "tokens_per_batch=49152"]
    text = refusal(settings(tmp_path / "nowhere", *large))
    assert "32,768 draft positions x 81,920 keys" in text
    assert "lower drafter.num_anchors" in text


def test_documents_longer_than_the_target_can_place_are_refused(target):
    preflight(settings(target, "data.max_length=512"))
    text = refusal(settings(target, "data.max_length=513"))
    assert "data.max_length=513 must not exceed the target's max_position_embeddings=512" in text


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_what_a_target_lacks_is_found_without_loading_it(target, tmp_path):
    def changed(name: str) -> Path:
        return Path(shutil.copytree(target, tmp_path / name / "target"))

    quantised = changed("quantised")
    edit(quantised / "config.json", quantization_config={"quant_method": "fp8"})
    assert "is quantised" in refusal(settings(quantised))
    tied = changed("tied")
    (tied / "model.safetensors").unlink()
    assert "neither model.safetensors nor" in refusal(settings(tied))
    preflight(settings(tied, "target.random_weights=true"))  # then none are needed
    shards = build_target("qwen3_sharded", tmp_path / "shards" / "target")
    (lost, *_) = sorted(shards.glob("model-*.safetensors"))[1:]
    lost.unlink()
    assert f"['{lost.name}'] are missing" in refusal(settings(shards))
    plain = changed("template")
    (plain / "chat_template.jinja").unlink()
    assert "no chat template" in refusal(settings(plain))


CODE = """
from pathlib import Path
from transformers import Qwen3Config
Path({marker!r}).touch()
class OwnConfig(Qwen3Config):
    model_type = "own"
"""


def test_code_that_comes_with_a_target_runs_only_when_that_is_asked_for(
    copy, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    marker = tmp_path / "it ran"
    (copy / "own.py").write_text(CODE.format(marker=str(marker)))
    edit(copy / "config.json", model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
    text = refusal(settings(copy))
    assert "target.trust_remote_code=true runs the code that comes with the target" in text
    assert not marker.exists()
    with pytest.raises(ConfigError):  # the mask token of an unknown family: its config was read
        preflight(settings(copy, "target.trust_remote_code=true", "drafter.mask_token_id=258"))
    assert marker.exists()


def test_attention_is_one_that_transformers_has(target):
    assert "sdpa" in refusal(settings(target, "target.attention=sdp"))
    text = refusal(settings(target, "target.attention=kernels-community/flash-attn"))
    assert "need target.trust_remote_code=true" in text


@pytest.mark.parametrize("name", ["checkpoints", "export", "metrics.jsonl", "checkpoints/x"])
def test_a_link_that_leads_out_of_the_run_is_refused(copy, tmp_path, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    assert f"{link} is a link to {outside}" in refusal(settings(copy))
    link.unlink()
    (link.parent / "real").mkdir()
    link.symlink_to(link.parent / "real")
    preflight(settings(copy))


def test_a_link_in_place_of_the_folder_is_the_users_choice(copy, tmp_path):
    (tmp_path / "large disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "large disk")
    preflight(settings(copy))
    claim_folder(settings(copy), {}, "here")
    assert (tmp_path / "large disk" / "config.yaml").is_file()


def _hold(folder: Path, ready, end) -> None:
    hold_folder(folder)
    ready.set()
    end.wait(30)


@pytest.mark.parametrize("resume", ["auto", "none"])
def test_a_folder_in_use_is_refused_and_left_alone_until_its_run_is_dead(copy, tmp_path, resume):
    run = tmp_path / "run"
    leftover = run / "checkpoints" / ".tmp-step_00000006"  # the other run is just saving
    leftover.mkdir(parents=True)
    (run / "config.yaml").write_text("theirs")
    ready, end = FORK.Event(), FORK.Event()
    other = FORK.Process(target=_hold, args=(run, ready, end))
    other.start()
    try:
        assert ready.wait(30)
        config = settings(copy, f"resume={resume}")
        assert f"output_dir={run} is in use by another run" in refusal(config)
        with pytest.raises(ConfigError, match="in use"):  # it came between check and claim
            claim_folder(config, {}, "here")
        assert leftover.is_dir()
        assert (run / "config.yaml").read_text() == "theirs"
    finally:
        other.kill()
        other.join(30)
    preflight(config)
    claim_folder(config, {}, "here")
    assert (run / "config.yaml").read_text() != "theirs"
    assert (tmp_path / "run.1").is_dir() == (resume == "none")


@pytest.mark.parametrize("resume", ["auto", "none", "run/checkpoints/step_00000003"])
def test_what_a_killed_save_left_is_gone_once_the_folder_is_taken(copy, tmp_path, resume):
    leftover = tmp_path / "run" / "checkpoints" / ".tmp-step_00000006"
    leftover.mkdir(parents=True)
    claim_folder(settings(copy, f"resume={resume}"), {}, "here")
    assert not leftover.exists()


def _claim(config: Config, barrier, results) -> None:
    barrier.wait(30)
    try:
        claim_folder(config, {}, "here")
        results.put("claimed")
    except ConfigError as error:
        results.put(str(error))
    barrier.wait(30)  # keep the lock until all have tried


def test_of_runs_started_at_once_one_gets_the_folder(copy):
    barrier, results = FORK.Barrier(4), FORK.Queue()
    config = settings(copy, "resume=none")
    racers = [FORK.Process(target=_claim, args=(config, barrier, results)) for _ in range(4)]
    for racer in racers:
        racer.start()
    outcomes = [results.get(timeout=30) for _ in racers]
    for racer in racers:
        racer.join(30)
    assert outcomes.count("claimed") == 1
    assert sum("in use by another run" in outcome for outcome in outcomes) == 3


def test_each_wrong_place_to_resume_from_is_told_apart(copy, tmp_path):
    run = tmp_path / "run"
    (run / "empty").mkdir(parents=True)
    (run / "checkpoints" / "step_00000003").mkdir(parents=True)
    (run / "half").mkdir()
    (run / "half" / "config.json").touch()
    for place, words in (
        (run / "nowhere", "does not exist"),
        (run / "empty", "is an empty folder"),
        (run / "half", f"it has no {STATE_FILE}"),
        (run, f"give one of them, as {run}/checkpoints/step_00000003"),
        (run / "checkpoints", f"give one of them, as {run}/checkpoints/step_00000003"),
    ):
        text = refusal(settings(copy, f"resume={place}"))
        assert f"resume={place} " in text
        assert words in text


def test_what_is_written_down_holds_no_credential(copy, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "of-no-known-shape")
    monkeypatch.setattr(sys, "argv", ["train.py", "name=x", "--key=of-no-known-shape"])
    claim_folder(settings(copy), {"text": {}}, "here")
    written = {file.name: file.read_text() for file in (tmp_path / "run").iterdir()}
    assert set(written) == {"config.yaml", "data_report.json", "env.json"}
    assert "of-no-known-shape" not in "".join(written.values())
    assert json.loads(written["env.json"])["argv"][2] == "--key=***"


def test_a_place_that_cannot_be_written_is_named_before_any_text_is_read(target, tmp_path):
    (tmp_path / "file").write_text("")
    for key in ("output_dir", "data.cache_dir"):
        text = refusal(settings(target, f"{key}={tmp_path / 'file'}"))
        assert f"{key}={tmp_path / 'file'}: cannot write" in text


def test_an_env_json_that_is_cut_is_nobodys(copy, tmp_path):
    config = settings(copy)
    claim_folder(config, {}, "here")
    assert claimed_by(config) == "here"
    for text in ("", '{"launch": "he'):
        (tmp_path / "run" / "env.json").write_text(text)
        assert claimed_by(config) is None
