"""What a run promises, again on GPUs: equal losses, stops, kills, bad numbers, memory, one compilation.

`DFLASH_TEST_DEVICE=cpu` runs them on a CPU, which proves that they work, not that a GPU does.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from ranks import Outcome, report
from runs import rows, state
from training import Events, die, poison
from training import train as start

from dflash_ddp.compiling import _cache_counts
from dflash_ddp.profiling import FOLDER

DEVICE = os.environ.get("DFLASH_TEST_DEVICE", "cuda")
CUDA = DEVICE == "cuda"
# Ranks import this file before they choose a GPU: nothing here may wake CUDA, as is_available does.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CUDA and not torch.cuda.device_count(), reason="needs a CUDA device"),
]
needs_two = pytest.mark.skipif(
    CUDA and torch.cuda.device_count() < 2, reason="needs two CUDA devices"
)
COLOCATED = ["split=colocated", "split.targets=1", "split.drafters=1"]
SHARED = ["split.targets=2", "split.drafters=1", f"split.share_gpu={str(CUDA).lower()}"]
STEPS = 8
COLD_LIMIT_S = 300.0  # a first run compiles for a minute or more
SAME = 2e-3  # of a loss: kernels that another process has tuned may sum in another order, in bf16


def train(material, num_ranks: int, name: str, *more: str, **options: object) -> list[Outcome]:
    """A run of 8 steps on the device; both dtypes are those of a GPU."""
    overrides = material.overrides(name, f"device={DEVICE}", f"steps={STEPS}", "eval.every=4")
    overrides += ["checkpoint.every=4", "drafter.dtype=bfloat16", "target.dtype=bfloat16", *more]
    events: Events = options.pop("events", {})  # type: ignore[assignment]
    return start(num_ranks, overrides, events, limit_s=COLD_LIMIT_S, **options)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """Compiled code of these tests alone: the first run finds nothing. Set before ranks are forked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        for name in (
            "TORCHINDUCTOR_CACHE_DIR",
            "TRITON_CACHE_DIR",
        ):  # torch sets them as it compiles
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="module")
def whole(material, own_cache):
    """An undisturbed colocated run, and what it printed."""
    (outcome,) = train(material, 1, "gpu whole", *COLOCATED, "profile.steps=[2,4]")
    return material.output("gpu whole"), outcome.output


def losses(folder) -> dict[int, float]:
    return {row["step"]: row["train/loss"] for row in rows(folder) if "train/loss" in row}


def assert_same_losses(folder, other) -> None:
    found, expected = losses(folder), losses(other)
    assert list(found) == list(expected) == list(range(1, STEPS + 1))
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=SAME)


def used_memory() -> int:
    """MiB in use on the GPUs that we see, by whomever."""
    if not CUDA:
        return 0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        query += ["-i", visible]
    answer = subprocess.run(query, check=True, capture_output=True, text=True).stdout
    return sum(map(int, answer.split()))


def assert_memory_is_back(before: int) -> None:
    """Nothing that a run took is left; the driver needs a moment."""
    end = time.monotonic() + 10
    while used_memory() > before + 64:
        assert time.monotonic() < end, f"{used_memory()} MiB in use, {before} before"
        time.sleep(0.2)


def test_a_colocated_run_traces_and_saves_without_a_stall(whole):
    folder, output = whole
    assert (folder / FOLDER / "colocated_rank0.json.gz").is_file()
    stalls = [float(s) for s in re.findall(r"training stood still for ([\d.]+) s", output)]
    assert len(stalls) == 2
    assert max(stalls) < 0.2
    assert f"dev: steps={STEPS} " in output


def test_streamed_features_give_the_same_losses(material, whole):
    """Two targets and a drafter, on one GPU over real NCCL."""
    train(material, 3, "gpu shared", *SHARED)
    assert_same_losses(material.output("gpu shared"), whole[0])


@needs_two
def test_two_gpus_give_the_same_losses(material, whole):
    train(material, 2, "gpu stream", "split=1t1d")
    assert_same_losses(material.output("gpu stream"), whole[0])


def test_a_second_start_compiles_nothing(material, whole):
    (outcome,) = train(material, 1, "gpu again", *COLOCATED)
    if CUDA:
        for role in ("target", "drafter"):
            words = rf"compiled code of the {role}: cache (\w+), (\d+) graphs read, (\d+) compiled"
            (first,), (second,) = (re.findall(words, text) for text in (whole[1], outcome.output))
            assert first[0] == "miss"
            assert (second[0], second[2]) == ("hit", "0")
            assert int(second[1]) > 0
    assert_same_losses(material.output("gpu again"), whole[0])


def use_cache(folder: str) -> None:
    os.environ["XDG_CACHE_HOME"] = folder


def tell_compiled() -> None:
    sys.stderr.write(f"graphs read and compiled: {_cache_counts()}\n")


@needs_two
def test_ranks_of_two_gpus_share_what_one_compiles(material, tmp_path):
    events = {(rank, "train step", 1): tell_compiled for rank in (0, 1)}
    events |= {(rank, "connect", 1): partial(use_cache, str(tmp_path)) for rank in (0, 1)}
    split = ["split=colocated", "split.targets=2", "split.drafters=2", "batches_per_step=2"]
    outcomes = train(material, 2, "gpu pair", *split, events=events)
    words = r"graphs read and compiled: \((\d+), (\d+)\)"
    pairs = [re.findall(words, o.output)[0] for o in outcomes]
    if CUDA:  # whoever came first to a role's code; what one has compiled the other reads
        (read, made), (other_read, other_made) = (map(int, pair) for pair in pairs)
        assert made + other_made > 0
        assert read >= other_made, pairs
        assert other_read >= made, pairs


def test_a_signal_saves_and_the_run_goes_on(material, whole):
    before, folder = used_memory(), material.output("gpu stopped")
    train(
        material,
        1,
        folder.name,
        *COLOCATED,
        events={(0, "train step", 6): signal.SIGTERM},
        pace_s=0.2,
    )
    assert_memory_is_back(before)
    assert max(losses(folder)) < STEPS
    train(material, 1, folder.name, *COLOCATED)
    assert_same_losses(folder, whole[0])


@pytest.mark.parametrize(("rank", "phase"), [(0, "forward item"), (2, "train step")])
def test_a_killed_rank_ends_all_and_frees_all(material, whole, rank, phase):
    before, name = used_memory(), f"gpu killed {rank}"
    more = ["steps=2000", "eval.every=0"]
    events = {(rank, phase, 3): die}
    outcomes = train(material, 3, name, *SHARED, *more, events=events, check=False, pace_s=0.05)
    at = next(
        float(o.output.partition("happens at ")[2].split()[0])
        for o in outcomes
        if "happens at" in o.output
    )
    for outcome in outcomes:
        assert outcome.rank == rank or outcome.exit_code == 13, report(outcomes)
        assert outcome.ended_at - at < 10, report(outcomes)
    assert "died: its process" in (material.output(name) / "failure.json").read_text()
    assert_memory_is_back(before)


def test_a_bad_batch_is_left_out(material, whole):
    events = {(0, "train step", 3): partial(poison, float("nan"), 1)}
    (outcome,) = train(material, 1, "gpu bad", *COLOCATED, events=events)
    folder = material.output("gpu bad")
    assert "step 3: loss or gradient is not finite" in outcome.output, outcome.output
    assert state(folder, STEPS)["adamw_steps"].item() == STEPS - 1
    assert (folder / "bad_steps" / "step_00000003_rank_0.json").is_file()
    assert all(tensor.isfinite().all() for tensor in state(folder, STEPS).values())


def take_all() -> None:
    """More than any GPU has."""
    torch.empty(1 << 48, dtype=torch.uint8, device=DEVICE)


def test_out_of_memory_is_explained(material, whole):
    events = {(0, "train step", 2): take_all if CUDA else "oom"}
    more = ["loss.chunk_rows=1024", "drafter.num_anchors=512"]
    (outcome,) = train(material, 1, "gpu full", *COLOCATED, *more, events=events, check=False)
    assert outcome.exit_code == 13, outcome.output
    assert "has no memory left; any of these would help:" in outcome.output
    assert "loss.chunk_rows=256 (now 1024) saves" in outcome.output, outcome.output
    snapshot = material.output("gpu full") / FOLDER / "memory_rank0.pickle"
    assert snapshot.is_file() or not CUDA


def test_a_state_from_a_gpu_goes_on_on_a_cpu(material, whole):
    folder = material.output("gpu then cpu")
    shutil.copytree(whole[0], folder)
    shutil.rmtree(folder / "checkpoints" / f"step_{STEPS:08d}")
    train(material, 1, folder.name, *COLOCATED, "device=cpu")
    assert losses(folder)[STEPS] == pytest.approx(losses(whole[0])[STEPS], rel=0.05)
