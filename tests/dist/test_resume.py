"""A run that was cut into pieces is the same run: weights, optimizer and metrics, bit for bit."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch._inductor.cpu_vec_isa
from ranks import report
from runs import assert_equal_state, rows, state
from training import train

import dflash_ddp.drafter.worker
from dflash_ddp.compiling import cache_directory

pytestmark = pytest.mark.dist

# 18 packed batches make an epoch, so step 9 is the end of the first.
RUN = "batches_per_step=2 steps=12 eval.every=5 logging.every=4 checkpoint.every=1 checkpoint.keep_last=99".split()
DRAFTER = 1
ONE, TWO = (["split.targets=1", f"split.drafters={d}"] for d in (1, 2))


@pytest.fixture(scope="session")
def whole(material) -> dict[int, Path]:
    """Undisturbed runs of one and of two drafter ranks."""
    outcomes = train(2, material.overrides("whole one", *RUN, *ONE))
    assert "in 18 packed batches" in outcomes[0].output
    train(3, material.overrides("whole two", *RUN, *TWO))
    return {1: material.output("whole one"), 2: material.output("whole two")}


def cut(run: Path, step: int, copy: Path) -> None:
    """The run as it was killed some time after the checkpoint of a step."""
    if run != copy:
        shutil.copytree(run, copy)
    for checkpoint in (copy / "checkpoints").iterdir():
        if int(checkpoint.name[-8:]) > step:
            shutil.rmtree(checkpoint)


@pytest.mark.parametrize("drafters", [1, 2])
def test_cut_again_and_again_it_is_the_same_run(material, whole, drafters):
    """Between rows, at an epoch's end, at an evaluation; with 1, 2 and 3 target ranks."""
    copy = material.output(f"cut {drafters}")
    cut(whole[drafters], 3, copy)
    for targets, after in ((2, 9), (1, 10), (3, None)):
        split = [f"split.targets={targets}", f"split.drafters={drafters}"]
        outcomes = train(targets + drafters, material.overrides(copy.name, *RUN, *split))
        assert any("going on from" in o.output for o in outcomes), report(outcomes)
        assert "has no row" not in report(outcomes)
        assert rows(copy) == rows(whole[drafters])
        assert_equal_state(state(copy, 12), state(whole[drafters], 12))
        if after is not None:
            cut(copy, after, copy)
    exports = [(run / "export" / "model.safetensors").read_bytes() for run in (copy, whole[drafters])]
    assert exports[0] == exports[1]


@pytest.mark.parametrize(
    ("kept", "said"), [((), "1-8"), ((8,), "1-4"), ((4, 5), "6-8")], ids=["none", "last", "first"]
)
def test_rows_that_somebody_deleted_are_missed_in_one_line(material, whole, kept, said):
    """Rows end at steps 4, 5 (before an evaluation), 8, 10 (the same) and 12."""
    copy = material.output(f"rows {said}")
    cut(whole[1], 9, copy)
    file = copy / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if json.loads(line)["step"] in kept))
    if not kept:
        file.unlink()
    outcomes = train(2, material.overrides(copy.name, *RUN, *ONE))
    text = f"{file} has no row of steps {said}, which are not trained again"
    assert report(outcomes).count(text) == 1, report(outcomes)
    assert report(outcomes).count("has no row") == 1


def test_another_number_of_drafters_is_refused_or_goes_on_with_the_same_packs(material, whole):
    copy = material.output("other drafters")
    cut(whole[2], 5, copy)
    refused = train(2, material.overrides(copy.name, *RUN, *ONE), check=False)
    text = "".join(outcome.output for outcome in refused)
    assert "split.drafters: 2 in the checkpoint, 1 now" in text
    assert "resume_other_drafters=true batches_per_step=2 goes on" in text
    train(2, material.overrides(copy.name, *RUN, *ONE, "resume_other_drafters=true"))
    for ours, theirs in zip(rows(copy), rows(whole[2]), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
    ours, theirs = state(copy, 12), state(whole[2], 12)
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).abs().max() <= 1e-3 * tensor.abs().max() + 1e-12, name


def load_another_step() -> None:
    """A node with outputs of its own, where a checkpoint of this name holds other weights."""
    load = dflash_ddp.drafter.worker.load_tensors

    def load_tensors(folder: Path, *args: object) -> None:
        load(folder.with_name("step_00000004"), *args)

    dflash_ddp.drafter.worker.load_tensors = load_tensors


def test_a_rank_that_loads_other_weights_is_named(material, whole):
    copy = material.output("other weights")
    cut(whole[2], 5, copy)
    before = (copy / "metrics.jsonl").read_bytes()
    events = {(2, "build drafter", 1): load_another_step}
    outcomes = train(3, material.overrides(copy.name, *RUN, *TWO), events, check=False)
    assert {outcome.exit_code for outcome in outcomes} == {13}, report(outcomes)
    text = "step_00000005 holds other weights or moments on drafter ranks [2] than on rank 1"
    assert report(outcomes).count(text) == 1, report(outcomes)
    assert (copy / "metrics.jsonl").read_bytes() == before


CHANGES = {
    "optim.lr=1e-3": "optim.lr: 0.002 in the checkpoint, 0.001 now",
    "optim.beta2=0.99": "optim.beta2: 0.95 in the checkpoint, 0.99 now",
    "drafter.block_size=5": "drafter.block_size: 4 in the checkpoint, 5 now",
    "drafter.mask_token_id=290": "drafter.mask_token_id: ",
    "target.capture_layers=[0,1]": "target.capture_layers: ",
    "target.dtype=bfloat16": "target.dtype: 'torch.float32' in the checkpoint, 'torch.bfloat16' now",
    "data.max_length=128": "data.max_length: 256 in the checkpoint, 128 now",
    "data.enable_thinking=true": "data.enable_thinking: None in the checkpoint, True now",
    "seed=3": "seed: 0 in the checkpoint, 3 now",
    "tokens_per_batch=512": "tokens_per_batch: 256 in the checkpoint, 512 now",
}


def test_each_change_is_named_and_a_changed_template_and_text_too(material, whole, tmp_path):
    target = tmp_path / "target"
    shutil.copytree(material.folder / "target", target)
    for file in (target / "chat_template.jinja", target / "tokenizer_config.json"):
        if file.is_file():
            old = file.read_text()
            file.write_text(
                old + "\n" if file.suffix == ".jinja" else old.replace("{%- for", " {%- for", 1)
            )
    data = tmp_path / "train.jsonl"
    lines = (material.folder / "train.jsonl").read_text().splitlines(keepends=True)
    data.write_text("".join(lines[:-1]))
    more = [*CHANGES, f"target.path={target}", f"data.path={data}"]
    outcomes = train(2, material.overrides("whole one", *RUN, *ONE, *more), check=False)
    text = "".join(outcome.output for outcome in outcomes)
    for line in (*CHANGES.values(), "target chat template: ", "data content: ", "data tokens: ", "data.path: "):
        assert text.count(line) == 1, (line, text)
    assert json.loads((whole[1] / "checkpoints/step_00000012/trainer.json").read_text())["step"] == 12


def compile_for_no_vectors() -> None:
    """Vector instructions take time: to try what there is, to read their headers. A cache of its own keeps them out."""
    torch._inductor.cpu_vec_isa.valid_vec_isa_list = list
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_directory() / "no_vectors")


def test_compiled_or_not_it_goes_on(material):
    """Compiled to the end, bit for bit; with the compiler switched on half-way, within rounding."""
    quick = {(DRAFTER, "connect", 1): compile_for_no_vectors}
    short = [*RUN, "steps=4", "eval.every=0", "eval.at_start=false", *ONE]
    compiled = [*short, "drafter.compile=true"]
    train(2, material.overrides("compiled", *compiled), quick)
    for name, words in (("compiled again", compiled), ("compiled late", compiled)):
        source = "compiled"
        if name == "compiled late":
            source = "not compiled"
            train(2, material.overrides(source, *short))
        cut(material.output(source), 2, material.output(name))
        train(2, material.overrides(name, *words), quick)
    whole = state(material.output("compiled"), 4)
    assert_equal_state(state(material.output("compiled again"), 4), whole)
    plain = state(material.output("not compiled"), 4)
    for name, tensor in state(material.output("compiled late"), 4).items():
        assert (tensor - plain[name]).abs().max() <= 1e-3 * plain[name].abs().max() + 1e-9, name
