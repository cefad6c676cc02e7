"""The plan: operations against PyTorch's own count, rates and memory against measurements, ranking against others."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from targets import build_target
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel

from dflash_ddp import costs, plan
from dflash_ddp.bench.drafter import DrafterBench, workload_drafter
from dflash_ddp.bench.workloads import WORKLOADS, drafter_shape, target_config
from dflash_ddp.config import LossConfig
from dflash_ddp.costs import GIB, GPUS
from dflash_ddp.drafter.model import Drafter
from dflash_ddp.facts import Facts, read_facts
from dflash_ddp.plan import load_config, make_plan

H200 = GPUS["h200"]


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> dict[str, Path]:
    """Folders with nothing but the config.json of a large target."""
    folder = tmp_path_factory.mktemp("configs")
    for name, workload in (("8b", "8b"), ("27b", "headline")):
        target_config(WORKLOADS[workload]).save_pretrained(folder / name)
    return {"8b": folder / "8b", "27b": folder / "27b"}


def facts_of(large, name: str, *overrides: str) -> Facts:
    first = ["experiment=qwen3_8b"] if name == "8b" else []
    return read_facts(load_config([*first, f"target.path={large[name]}", *overrides]))


@pytest.mark.parametrize(("name", "published"), [("8b", 1_048_626_432), ("27b", 1_730_213_120)])
def test_parameters_are_those_of_the_model_and_of_the_published_drafters(large, name, published):
    shape = facts_of(large, name).shape
    with torch.device("meta"):
        built = sum(p.numel() for p in Drafter(shape).parameters())
    assert costs.drafter_parameters(shape) == built == published


def counted(counter: FlopCounterMode) -> int:
    """Operations of matrix products, without attention."""
    found = counter.get_flop_counts()["Global"]
    return sum(n for op, n in found.items() if str(op) in ("aten.mm", "aten.addmm", "aten.bmm"))


def test_operations_of_the_drafter_are_what_pytorch_counts():
    work, chunk = WORKLOADS["tiny"], 48
    bench = workload_drafter(work, torch.device("cpu"), LossConfig(chunk_rows=chunk))
    with FlopCounterMode(display=False) as counter:
        bench.forward_backward()
    config = load_config(["experiment=demo"])
    config.tokens_per_batch, config.drafter.num_anchors = work.tokens, work.num_anchors
    config.drafter.block_size = work.block_size
    products, _ = costs.drafter_flops(drafter_shape(work), config, work.table_rows)
    drafted = work.num_anchors * (work.block_size - 1)
    head = 4 * work.hidden_size * work.table_rows
    in_chunks = (
        bench.hosts[1].num_chunks * chunk
    )  # the last chunk is padded, cut slots are left out
    # The counter sees dense attention as batched products or not at all; tiny attention is neither.
    assert counted(counter) - head * in_chunks == products - head * drafted


@pytest.mark.parametrize("kind", ["qwen3_tied", "qwen3_5"])
def test_operations_of_the_target_are_what_pytorch_counts(tmp_path, kind):
    folder = build_target(kind, tmp_path)
    facts = read_facts(load_config(["experiment=demo", f"target.path={folder}"]))
    model = AutoModel.from_pretrained(folder)
    layers = getattr(model, "language_model", model).layers[: facts.layers[-1] + 1]
    tokens, linear = 128, 0

    def count(module, args, _output):
        nonlocal linear
        linear += 2 * module.weight.numel() * (args[0].numel() // args[0].shape[-1])

    for layer in layers:
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(count)
    model(input_ids=torch.zeros(1, tokens, dtype=torch.long))
    assert costs.target_flops(facts.sizes, tokens)[0] * tokens == linear


def test_rates_are_the_measured_ones_where_they_were_measured(large):
    """H200: target capture in documents of 2,048 tokens, and the drafter's step."""
    for name, target, drafter, document in (
        ("8b", 45_303, 16_384 / 0.251, 2048),
        ("27b", 11_310, 49_152 / 0.9, 4096),
    ):
        facts = facts_of(large, name, f"data.max_length={document}")
        seconds = costs.target_seconds(facts.sizes, 2048, H200)
        assert 1 / seconds == pytest.approx(target, rel=0.03)
        assert 1 / facts.drafter_seconds(H200) == pytest.approx(drafter, rel=0.04)


@pytest.mark.parametrize(("name", "measured_gib"), [("8b", 18), ("27b", 39)])
def test_memory_is_the_measured_one_where_it_was_measured(large, name, measured_gib):
    """The benchmark's step holds masters without moments or gradients, and one slot; chunks of 3,840."""
    facts = facts_of(large, name, "split.depth=0", "loss.chunk_rows=3840")
    total = sum(facts.drafter_memory().values())
    assert (total - 12 * costs.drafter_parameters(facts.shape)) / GIB == pytest.approx(
        measured_gib, rel=0.05
    )


def rate(facts: Facts, split: str) -> int:
    rows = make_plan(facts, 8, H200, None)["splits"]
    return next(row["tokens_per_s"] for row in rows if row["split"] == split)


def test_splits_rank_as_published_runs_of_others_did(large):
    """SpecForge on 8 H200, 512 x 16: samples/s by split, samples of 4.5k and (8B) of 550 tokens."""
    for name, document, published in (
        ("27b", 4_500, {"5t3d": 10.65, "4t4d": 9.05, "3t5d": 6.82}),
        ("8b", 550, {"1t7d": 50.1, "2t6d": 39.0}),
    ):
        tokens = -(-document // 128) * 128
        sizes = (f"tokens_per_batch={tokens}", f"data.max_length={document}")
        facts = facts_of(large, name, *sizes, "drafter.num_anchors=512")
        predicted = {split: rate(facts, split) / document for split in published}
        assert sorted(predicted, key=predicted.get) == sorted(published, key=published.get)
        for split, samples in published.items():  # ours is the faster one, by less than two
            assert 1 < predicted[split] / samples < 2


def test_no_role_waits_at_the_balancing_anchors(large):
    facts = facts_of(large, "27b")
    for row in make_plan(facts, 8, H200, None)["splits"][:-1]:
        balanced = facts.with_setting("drafter.num_anchors", row["balancing_anchors"])
        one = 1 / balanced.drafter_seconds(H200)
        assert row["drafters"] * one == pytest.approx(row["target_tokens_per_s"], rel=0.01)


def test_more_of_anything_needs_more_memory_and_what_does_not_fit_is_not_recommended(large):
    small, more = facts_of(large, "27b"), facts_of(large, "27b", "drafter.num_anchors=4096")
    assert sum(more.drafter_memory().values()) > sum(small.drafter_memory().values())
    found = make_plan(more, 8, GPUS["a100"], None)
    assert not any(row["fits"] for row in found["splits"])
    assert found["best"] is None
    assert "No split fits NVIDIA A100" in found["recommendation"]


@pytest.mark.parametrize("role", ["drafter", "target"])
def test_each_advice_on_memory_saves_what_it_says(large, role):
    facts = facts_of(large, "27b")
    needed = facts.drafter_memory if role == "drafter" else facts.target_memory
    advice = facts.memory_advice(role, 1.5 * GIB)
    assert len(advice) == {"drafter": 4, "target": 2}[role]
    for line in advice:
        key, value = line.split()[0].split("=")
        batch = f"tokens_per_batch={value}" if key == "tokens_per_batch" else f"{key}={value}"
        lowered = replace(facts, config=load_config([batch]))
        of = lowered.drafter_memory if role == "drafter" else lowered.target_memory
        saved = (sum(needed().values()) - sum(of().values())) / GIB
        assert f"saves {saved:.2f} GiB" in line
        assert (saved >= 1.5) == ("not enough" not in line)


def run_main(monkeypatch, capsys, *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["plan", *words])
    plan.main()
    return capsys.readouterr().out


def test_the_command_prints_a_table_or_one_object(large, monkeypatch, capsys):
    words = (f"target.path={large['27b']}", "gpus=4", "gpu=h100")
    text = run_main(monkeypatch, capsys, *words)
    found = json.loads(run_main(monkeypatch, capsys, *words, "json=True"))
    assert text.splitlines()[-1] == found["recommendation"]
    assert [row["split"] for row in found["splits"]] == ["3t1d", "2t2d", "1t3d", "colocated"]
    assert f"{found['splits'][0]['tokens_per_s']:,}" in text
    assert found["gpu"] == "NVIDIA H100"


def test_a_few_real_steps_of_the_real_drafter_replace_the_prediction(tmp_path, monkeypatch, capsys):
    """Also with more captured layers than drafter layers, a window and causal blocks."""
    folder = build_target("qwen3_tied", tmp_path)
    words = [
        "experiment=demo",
        f"target.path={folder}",
        "tokens_per_batch=256",
        "data.max_length=128",
    ]
    words += ["target.capture_layers=[0,1,4]", "drafter.sliding_layers=1", "drafter.is_causal=true"]
    words += ["drafter.sliding_window=32", "drafter.dtype=bfloat16"]
    benches = []

    class Seen(DrafterBench):
        def __init__(self, *args, **named):
            super().__init__(*args, **named)
            benches.append(self)

    monkeypatch.setattr(plan, "DrafterBench", Seen)
    words += ["measure=true", "json=true", "gpus=3"]
    found = json.loads(run_main(monkeypatch, capsys, *words))
    (bench,) = benches
    assert bench.shape == read_facts(load_config(words[:-3])).shape
    assert bench.features_SC.dtype == torch.bfloat16
    assert found["measured"]
    assert found["splits"][0]["target_tokens_per_s"] > 0
    assert "measured" in found["recommendation"]


@pytest.mark.parametrize(("gpus", "told", "expected"), [(3, None, 1), (1, None, 2), (3, "2", 2)])
def test_steps_are_measured_with_the_threads_that_a_rank_will_have(
    large, monkeypatch, capsys, gpus, told, expected
):
    """As torchrun sets them, so that the plan is that of the run, also where others use the cores."""
    seen = []

    def measure(_facts):
        seen.append(torch.get_num_threads())
        return 1e-3, 1e-3

    monkeypatch.setattr(plan, "measure", measure)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if told is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", told)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        words = (f"target.path={large['8b']}", "experiment=qwen3_8b", f"gpus={gpus}")
        run_main(monkeypatch, capsys, *words, "measure=true")
    finally:
        torch.set_num_threads(before)
    assert seen == [expected]


@pytest.mark.parametrize("batches", [None, 1, 7, 8, 12])
def test_the_split_that_is_recommended_is_one_that_training_takes(
    large, monkeypatch, capsys, batches
):
    """Of a fixed batches_per_step it is the fastest that divides it; a faster one is named with what it needs."""
    settings = [f"target.path={large['8b']}", "experiment=qwen3_8b", "drafter.num_anchors=4096"]
    settings += [] if batches is None else [f"batches_per_step={batches}"]
    text = run_main(monkeypatch, capsys, *settings, "gpus=8", "gpu=h200")
    found = json.loads(run_main(monkeypatch, capsys, *settings, "gpus=8", "gpu=h200", "json=true"))
    allowed = {row["split"] for row in found["splits"] if row["allowed"]}
    assert len(allowed) == {None: 8, 1: 1, 7: 2, 8: 4, 12: 5}[batches]
    assert found["best"] in allowed
    for split in ("1t7d", "colocated"):
        assert (f"{split}* " in text) == (split not in allowed)
    assert ("* not with batches_per_step=" in text) == (len(allowed) < 8)
    taken = re.match(r"Take (split.targets=\d split.drafters=\d): ", found["recommendation"])[1]
    load_config([*settings, *taken.split()])  # training would refuse any other
    rates = {row["split"]: row["tokens_per_s"] for row in found["splits"]}
    del rates["colocated"]
    assert rates[found["best"]] == max(rates[split] for split in allowed - {"colocated"})
    better = max(rates, key=rates.get)
    named = (
        f"split.drafters={better[2]} reaches {rates[better]:,}, if batches_per_step={batches} may"
    )
    assert (named in text) == (better != found["best"])
    needs = "if batches_per_step may be a multiple of 8"
    assert (needs in text) == (batches != 8)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["gpu=h2000"], "gpu=h2000 must be one of h200"),
        (["gpu=h200", "gpus=0"], "gpus=0 must be >= 1"),
        (["gpu=h200", "json=maybe"], "json: Value 'maybe' is not a valid bool"),
        (["gpu=h200", "measure"], "measure: arguments are key=value; keys: gpus, gpu"),
        (["gpu=h200", "optim.lrr=1"], "lrr"),
        (["gpu=h200", "target.path=nowhere/target"], "target.path='nowhere/target'"),
        (["gpu=h200", "steps=0"], "steps=0 must be >= 1"),
        (["gpu=h200", "batches_per_step=0"], "batches_per_step=0 must be >= 1"),
        (["gpu=h200", "batches_per_step=x"], "batches_per_step"),
    ],
)
def test_what_cannot_be_planned_is_named(monkeypatch, capsys, words, expected):
    monkeypatch.setattr(sys, "argv", ["plan", *words])
    with pytest.raises(SystemExit) as ended:
        plan.main()
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def test_gpu_auto_is_known_by_the_name_that_cuda_gives():
    assert costs.find_gpu("NVIDIA H100 80GB HBM3").gib == 79
    assert costs.find_gpu("Tesla T4") is None
