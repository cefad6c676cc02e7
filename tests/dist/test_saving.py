"""Saving while training goes on: bad disks, the best drafter, uploads."""

import errno
import json
import os
import re
import resource
import shutil
import signal
import socket
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from material import STEPS
from ranks import report
from runs import all_rows, rows, state
from safetensors.torch import load_file
from training import train

import dflash_ddp.drafter.saving
import dflash_ddp.upload
from dflash_ddp.checkpoint import complete_checkpoints
from dflash_ddp.disk import flush
from dflash_ddp.drafter.saving import best_step

pytestmark = pytest.mark.dist

DRAFTER = 1
SPLIT = ["split=1t1d", "steps=8", "checkpoint.every=2", "eval.every=0"]


def fill_disk() -> None:
    """No file of this process may grow beyond 20 kB from now on: writes fail as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


def empty_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def block(folder: Path) -> None:
    """Nothing can be made in the folder: a file has its name. (Tests may run as root, who may write anywhere.)"""
    shutil.rmtree(folder, ignore_errors=True)
    folder.write_text("")


def hurry() -> None:
    dflash_ddp.drafter.saving.LAST_TRIES_S = (0.1, 0.1)
    dflash_ddp.upload.TRIES_S = (0.1,)


def set_environment(env: dict[str, str]) -> None:
    """For a fork server that was started with another one."""
    import fsspec.config

    os.environ.update(env)
    fsspec.config.set_conf_env(fsspec.config.conf)


def keep_rows_from_disk() -> None:
    """A checkpoint whose rows a power loss would take is not put in place."""

    def refuse(path: Path) -> None:
        raise OSError(errno.EIO, f"{path} is not on disk")

    dflash_ddp.drafter.saving.flush = refuse


def let_rows_be_flushed() -> None:
    dflash_ddp.drafter.saving.flush = flush


def trouble(kind: str, output: Path) -> tuple:
    """What breaks the disk, and what mends it."""
    checkpoints = output / "checkpoints"
    return {
        "full": (fill_disk, empty_disk),
        "refuses": (partial(block, checkpoints), checkpoints.unlink),
        "rows not on disk": (keep_rows_from_disk, let_rows_be_flushed),
        "folder gone": (partial(shutil.rmtree, output), hurry),
    }[kind]


def saved_steps(output: Path) -> list[int]:
    return sorted(int(p.name[-8:]) for p in (output / "checkpoints").iterdir())


@pytest.mark.parametrize("kind", ["full", "refuses", "rows not on disk", "folder gone"])
def test_training_goes_on_without_a_disk_and_saves_when_it_is_back(material, kind):
    output = material.output(f"disk {kind}")
    breaks, mends = trouble(kind, output)
    events = {(DRAFTER, "train step", 4): breaks, (DRAFTER, "train step", 7): mends}
    outcomes = train(2, material.overrides(output.name, *SPLIT), events, pace_s=0.1)
    text = outcomes[DRAFTER].output
    if kind == "folder gone":
        assert saved_steps(output) == [4, 6, 8], report(outcomes)
        assert f"{output} is gone: it is made anew" in text
    else:
        assert saved_steps(output) == ([8] if kind == "refuses" else [2, 8]), report(outcomes)
        for step in (4, 6):
            assert f"checkpoint of step {step} cannot be written" in text
        assert text.count("trying again at the next one") == 2
        assert any('"checkpoint/failed": 2' in line for line in metrics(output))
    made = [row["step"] for row in rows(output) if "train/loss" in row]
    assert made[-5:] == [4, 5, 6, 7, 8]
    assert kind == "folder gone" or made[:3] == [1, 2, 3]


def slow_disk(seconds: float) -> None:
    """A checkpoint takes so long to write."""
    write = dflash_ddp.drafter.saving.write_checkpoint

    def write_slowly(*args: object, **options: object) -> Path:
        time.sleep(seconds)
        return write(*args, **options)

    dflash_ddp.drafter.saving.write_checkpoint = write_slowly
    dflash_ddp.drafter.saving.REPORT_EVERY_S = 0.2


def test_a_write_stalls_training_only_if_the_next_one_is_due_and_then_says_so(material):
    for seconds in (0.5, 1.5):
        output = material.output(f"slow disk {seconds}")
        events = {(DRAFTER, "build drafter", 1): partial(slow_disk, seconds)}
        overrides = material.overrides(output.name, *SPLIT, "checkpoint.every=4")
        text = train(2, overrides, events, pace_s=0.25)[DRAFTER].output
        found = [row for row in all_rows(output) if "checkpoint/stall_s" in row]
        assert all(row["checkpoint/write_s"] > seconds for row in found)
        told = "s for the checkpoint of step 4, whose write is not finished"
        if seconds < 1:
            assert 0 <= found[0]["checkpoint/stall_s"] < 0.2
            assert told not in text
        else:
            assert told in text


def shrink_disk() -> None:
    """There is room for two checkpoints."""
    write = dflash_ddp.drafter.saving.write_checkpoint

    def write_or_fail(checkpoints: Path, *args: object, **options: object) -> Path:
        if len(complete_checkpoints(checkpoints)) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(checkpoints, *args, **options)

    dflash_ddp.drafter.saving.write_checkpoint = write_or_fail


def test_a_disk_too_small_for_keep_last_keeps_the_newest(material):
    output = material.output("small disk")
    events = {(DRAFTER, "train step", 1): shrink_disk}
    more = ["checkpoint.keep_last=3", "checkpoint.export=last"]
    outcomes = train(2, material.overrides(output.name, *SPLIT, *more), events)
    assert saved_steps(output) == [6, 8], report(outcomes)
    assert "has no space for checkpoint.keep_last=3 and one more" in outcomes[DRAFTER].output


def refuse_export(room_for: int) -> None:
    """A copy stops half-way on a disk that has room for `export/` beside so many checkpoints only."""
    copy = shutil.copytree

    def copy_or_fail(source: Path, work: Path, **options: object) -> None:
        copy(source, work, **options)
        if len(complete_checkpoints(source.parent)) > room_for:
            raise OSError(errno.ENOSPC, "No space left on device")

    dflash_ddp.drafter.saving.shutil.copytree = copy_or_fail


@pytest.mark.parametrize("room_for", [1, 0])
def test_an_export_on_a_full_disk_is_tried_again_like_the_last_checkpoint(material, room_for):
    output = material.output(f"full export {room_for}")
    events = {(DRAFTER, "build drafter", 1): partial(refuse_export, room_for)}
    events[DRAFTER, "train step", 1] = hurry
    overrides = material.overrides(output.name, *SPLIT, "checkpoint.export=last")
    outcomes = train(2, overrides, events, check=False)
    assert saved_steps(output) == [8], report(outcomes)
    assert not (output / ".tmp-export").exists()
    if room_for:
        assert (output / "export" / "model.safetensors").exists()
        assert {outcome.exit_code for outcome in outcomes} == {0}, report(outcomes)
    else:
        assert {outcome.exit_code for outcome in outcomes} == {13}, report(outcomes)
        cause = json.loads((output / "failure.json").read_text())["cause"]
        assert "export/ cannot be written" in cause


def metrics(output: Path) -> list[str]:
    return (output / "metrics.jsonl").read_text().splitlines()


@pytest.mark.parametrize(
    ("more", "n", "text"),
    [
        (["checkpoint.on_error=stop"], 2, "the checkpoint of step 2 cannot be written"),
        ([], 8, "the checkpoint of step 8 cannot be written"),
    ],
    ids=["told to stop", "the last one"],
)
def test_a_run_ends_with_an_error_if_told_so_or_if_nothing_comes_after(material, more, n, text):
    output = material.output("disk ends")
    events = {(DRAFTER, "load", 1): hurry, (DRAFTER, "evaluate", 1): hurry}
    events |= {(DRAFTER, "train step", n): fill_disk}
    overrides = material.overrides(output.name, *SPLIT, "resume=none", *more)
    outcomes = train(2, overrides, events, check=False)
    assert {outcome.exit_code for outcome in outcomes} == {13}, report(outcomes)
    assert text in json.loads((output / "failure.json").read_text())["cause"]


@pytest.mark.parametrize(("steps", "saved"), [(7, [5, 7]), (3, [3])])
def test_the_last_step_is_saved_wherever_it_falls(material, steps, saved):
    output = material.output(f"ends at {steps}")
    more = ["split=1t1d", f"steps={steps}", "checkpoint.every=5", "eval.every=0"]
    outcomes = train(2, material.overrides(output.name, *more))
    assert saved_steps(output) == saved, report(outcomes)
    exported = load_file(output / "export" / "model.safetensors")
    last = state(output, steps)
    assert all((last[f"master.{name}"] == weights).all() for name, weights in exported.items())


def test_the_best_drafter_is_kept_and_exported(material):
    """A learning rate so high that the drafter gets worse: the best is not the last."""
    output = material.output("best")
    more = ["steps=12", "eval.every=1", "checkpoint.every=0", "optim.lr=0.3", "optim.warmup_share=1"]
    more += ["data.heldout_generated=true"]
    overrides = material.overrides("best", "split=1t1d", *more, "checkpoint.keep_last=1")
    outcomes = train(2, overrides)
    measured = {r["step"]: r["heldout/accept_length"] for r in rows(output) if "heldout/documents" in r}
    best = best_step(measured)
    assert best is not None
    assert best < 12, measured
    assert saved_steps(output) == [best, 12]
    text = outcomes[DRAFTER].output
    assert f"accept_length={measured[best]:.4f}" in text, report(outcomes)
    assert f" best_step={best} export=" in text
    exported = load_file(output / "export" / "model.safetensors")
    kept = state(output, best)
    assert all((kept[f"master.{name}"] == weights).all() for name, weights in exported.items())
    assert not (output / "export" / "trainer.json").exists()


def test_best_step_is_the_first_of_equals_and_never_untrained():
    assert best_step({}) is None
    assert best_step({0: 3.0, 5: None}) is None
    assert best_step({0: 3.0, 10: 1.5, 5: 1.5, 15: 1.2}) == 5


def mirrored(folder: Path, names: list[str]) -> dict[str, bytes]:
    return {
        f"{name}/{file.name}": file.read_bytes()
        for name in names
        for file in (folder / name).iterdir()
    }


def test_checkpoints_are_uploaded_and_the_marker_names_the_newest(material, tmp_path):
    output = material.output("uploaded")
    overrides = material.overrides("uploaded", *SPLIT, f"checkpoint.upload=file://{tmp_path}/far")
    outcomes = train(2, overrides)
    far = tmp_path / "far"
    assert (far / "latest").read_text() == "step_00000008", report(outcomes)
    assert mirrored(far, ["step_00000008"]) == mirrored(output / "checkpoints", ["step_00000008"])
    assert mirrored(far, ["export"]) == mirrored(output, ["export"])


def test_an_upload_that_fails_never_stops_training(material, tmp_path):
    (tmp_path / "far").write_text("in the way")
    events = {(DRAFTER, "evaluate", 1): hurry}
    overrides = material.overrides("no way", *SPLIT, f"checkpoint.upload=file://{tmp_path}/far")
    outcomes = train(2, overrides, events)
    text = outcomes[DRAFTER].output
    assert "step_00000008 was not uploaded to" in text, report(outcomes)
    assert "going on without" in text
    assert saved_steps(material.output("no way"))[-1] == 8


def hang(*_args: object, **_options: object) -> None:
    threading.Event().wait()


def upload_to_nowhere(kind: str) -> None:
    """Uploads fail, with the long pauses of real runs between the tries, or never come back."""
    dflash_ddp.upload.AFTER_STOP_S = 1.0
    if kind == "hangs":
        dflash_ddp.upload.upload_folder = hang


def test_an_upload_never_holds_up_a_stop(material, tmp_path):
    """Wandb and the summary come before it, and the end within seconds."""
    (tmp_path / "far").write_text("in the way")
    more = ["steps=500", "checkpoint.every=0", f"checkpoint.upload=file://{tmp_path}/far"]
    for kind, said in (
        ("fails", "export was not uploaded to"),
        ("hangs", "told to stop: the upload of"),
    ):
        events = {(DRAFTER, "build drafter", 1): partial(upload_to_nowhere, kind)}
        events |= {(DRAFTER, "train step", 4): signal.SIGTERM}
        overrides = material.overrides(f"stop {kind}", *SPLIT, *more)
        outcome = train(2, overrides, events, pace_s=0.1)[DRAFTER]
        assert said in outcome.output, outcome.output
        assert outcome.output.index("dev: steps=") < outcome.output.index(said)
        (at,) = re.findall(r"happens at ([\d.]+)\n(?!.*happens)", outcome.output, re.DOTALL)
        assert outcome.ended_at - float(at) < 8, outcome.output


def test_upload_to_s3(material, monkeypatch):
    """A local server that speaks S3. The marker is written after the files."""
    moto = pytest.importorskip("moto.server")
    fsspec = pytest.importorskip("s3fs") and pytest.importorskip("fsspec")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    try:
        address = f"http://127.0.0.1:{port}"
        monkeypatch.setenv("FSSPEC_S3_ENDPOINT_URL", address)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        system = fsspec.filesystem("s3", endpoint_url=address, key="testing", secret="testing")
        overrides = material.overrides("s3", *SPLIT, "checkpoint.upload=s3://bucket/runs/one")
        system.mkdir("bucket")
        env = {key: os.environ[key] for key in os.environ if key.startswith(("FSSPEC", "AWS"))}
        events = {(DRAFTER, "connect", 1): partial(set_environment, env)}
        outcomes = train(2, overrides, events)
        root = "bucket/runs/one"
        assert system.cat_file(f"{root}/latest") == b"step_00000008", report(outcomes)
        checkpoints = mirrored(material.output("s3") / "checkpoints", ["step_00000008"])
        for name, content in checkpoints.items():
            assert system.cat_file(f"{root}/{name}") == content
        written = [system.info(f"{root}/{name}")["LastModified"] for name in checkpoints]
        assert max(written) <= system.info(f"{root}/latest")["LastModified"]
        assert system.exists(f"{root}/export/model.safetensors")
    finally:
        server.stop()
