"""Traces of the steps that were asked for, on both roles; and advice when memory runs out."""

import gzip
import json

import pytest
import torch
from targets import build_target
from training import train

from dflash_ddp.config import ConfigError
from dflash_ddp.costs import GIB
from dflash_ddp.plan import load_config
from dflash_ddp.profiling import MARGIN, out_of_memory, wanted_bytes


def steps_seen(file) -> int:
    """Forward passes through the first norm that a trace holds."""
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return sum(
        event.get("name", "").split("::")[-1] == "scaled_dot_product_attention" for event in events
    )


@pytest.mark.dist
def test_the_first_rank_of_each_role_writes_a_trace_of_the_steps_asked_for(material):
    name = "profiled"
    more = ["split=1t1d", "profile.steps=[2,4]", "eval.every=0", "eval.at_start=false"]
    outcomes = train(2, material.overrides(name, *more))
    folder = material.output(name) / "profile"
    assert {file.name for file in folder.iterdir()} == {
        "target_rank0.json.gz",
        "drafter_rank1.json.gz",
    }
    assert steps_seen(folder / "drafter_rank1.json.gz") == 2 * 2, "two steps of two layers"
    assert steps_seen(folder / "target_rank0.json.gz") >= 2
    output = "".join(outcome.output for outcome in outcomes)
    assert output.count("by self_cpu_time_total") == 2
    assert "aten::mm" in output


@pytest.mark.dist
def test_a_run_without_the_steps_asked_for_says_so_at_its_start(material):
    """Its steps follow from the text, or are made already; both roles look for theirs."""
    more = ["split=1t1d", "eval.every=0", "eval.at_start=false", "epochs=1", "steps=null"]
    for wanted in ("[5000,5002]", "[0,2]"):  # the second time all is complete
        words = material.overrides("short", *more, f"profile.steps={wanted}")
        output = "".join(outcome.output for outcome in train(2, words))
        said = (
            f"profile.steps={wanted.replace(',', ', ')}: there will be no trace, the run begins at"
        )
        assert output.count(said) == 2, output
    assert not (material.output("short") / "profile").exists()


def test_what_could_not_be_allocated_is_read_from_the_message():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.50 GiB. GPU 0 has a")
    assert wanted_bytes(error) == pytest.approx(MARGIN * 3.5 * GIB)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 96.00 MiB (GPU 0;")
    assert wanted_bytes(error) == pytest.approx(MARGIN * 96 * 2**20)


@pytest.mark.parametrize(
    ("role", "keys"),
    [
        ("drafter", ["split.depth", "loss.chunk_rows", "drafter.num_anchors", "tokens_per_batch"]),
        ("target", ["tokens_per_batch"]),
        ("colocated", ["drafter.num_anchors"]),
    ],
)
def test_out_of_memory_names_what_to_lower_and_by_how_much(tmp_path, role, keys):
    config = load_config(["experiment=demo", f"target.path={build_target('qwen3_tied', tmp_path)}"])
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 KiB.")
    text = out_of_memory(config, role, 3, error)
    assert f"rank 3 ({role})" in text
    for key in keys:
        assert f"  {key}=" in text
        assert "saves" in text


@pytest.mark.parametrize("steps", ["[3]", "[3,3]", "[-1,2]", "[1,2,3]", "[20,23] steps=20"])
def test_steps_are_a_range(steps):
    with pytest.raises(ConfigError, match=r"profile\.steps"):
        load_config(f"profile.steps={steps}".split())
