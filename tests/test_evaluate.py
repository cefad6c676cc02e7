"""The command that measures a drafter, on the demo's target: three ways to the same accept length."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from served import load_target, own_answer, teach
from targets import TABLE_ROWS, build_target

from dflash_ddp.accept import answer_spans
from dflash_ddp.config import Config, ConfigError, DrafterConfig
from dflash_ddp.data.packing import packed_batch
from dflash_ddp.decode import TargetReader
from dflash_ddp.evaluate import EvaluateConfig, Pair, evaluate, is_tie, run_config
from dflash_ddp.preflight import load_tokenizer
from dflash_ddp.settings import command_line, resolved
from dflash_ddp.texts import prepare_text

DEMO = Path(__file__).resolve().parents[1] / "demo"
UNUSED_ROW = 4120


def documents_of(target: Path, rows: Path, cache: Path):
    """The settings of a run on this text, and (prompt, answer) of each of its documents."""
    config, documents = Config(), []
    config.target.path, config.data.cache_dir = str(target), str(cache)
    config.data.num_workers, config.data.heldout = 0, str(rows)
    tokenizer = load_tokenizer(config)
    store = prepare_text(config, tokenizer, "heldout")
    for number in range(store.num_documents):
        batch = packed_batch(store, np.array([number]), number)
        (span,) = answer_spans(batch)
        ids = batch.input_ids.tolist()
        documents.append((ids[: span.first], ids[span.first : span.end]))
    return config, documents


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A drafter that knows three held-out answers of the demo, and text of two kinds."""
    folder = tmp_path_factory.mktemp("served")
    lines = (DEMO / "heldout.jsonl").read_text().splitlines()[:3]
    (folder / "own.jsonl").write_text("\n".join(lines) + "\n")
    rows = [json.loads(line) for line in lines]
    for row in rows[:2]:
        row["messages"][-1]["content"] = "Something that this target would never say, at length."
    (folder / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config, documents = documents_of(DEMO / "target", folder / "own.jsonl", folder / "cache")
    teach(
        DEMO / "target",
        documents,
        folder / "run" / "export",
        config=DrafterConfig(num_layers=1, block_size=8),
        mask_token_id=UNUSED_ROW,
        steps=50,
    )
    config.data.path = config.data.heldout = str(folder / "own.jsonl")
    (folder / "run" / "config.yaml").write_text(json.dumps(resolved(config)))
    return folder


def test_walk_our_loop_and_zlabs_give_the_same_accept_length(served):
    pytest.importorskip("dflash.model", reason="z-lab's reference: pip install --no-deps dflash")
    row = evaluate(EvaluateConfig(run=str(served / "run"), decode=True, reference=True))
    assert row["accept_length_walk"] > 1.5
    assert row["accept_length_decode"] == row["accept_length_walk"]
    assert row["accept_length_reference"] == row["accept_length_walk"]
    assert row["lossless"] is True
    assert (row["near_ties"], row["walks_that_differ"]) == (0, 0)
    assert (row["documents"], row["documents_on_text"]) == (3, 0)
    assert row["speedup"] > 0
    assert 1 < row["tokens_per_target_call"] < 8


@pytest.mark.parametrize(
    ("gap", "dtype", "tie"),
    [(5e-4, torch.float32, True), (0.1, torch.float32, False), (0.1, torch.bfloat16, True)],
)
def test_a_tie_is_where_the_target_finds_two_tokens_equally_good(gap, dtype, tie):
    """Answers differ at place 1; the target is asked there, with what came before, and only there."""
    read = []

    class Target:
        def start(self):
            read.clear()

        def read(self, ids, *, num_logits):
            read.extend(ids)
            return torch.tensor([[0.0, 1.0, 1.0 - gap, 5.0]], dtype=dtype), None

    pair = Pair(Target(), None, set(), Path())
    assert is_tie(pair, [7, 8], [3, 1, 0], [3, 2, 0]) == tie
    assert read == [7, 8, 3]
    assert not is_tie(pair, [7, 8], [3, 1], [3]), "an answer that ends early is no tie"


def test_a_hybrid_target_is_measured_alike(tmp_path):
    """Recurrent layers, inside a vision wrapper; answers by the target, since it wrote no text."""
    target = build_target("qwen3_5", tmp_path / "target")
    turns = [("user", "one two three?"), ("assistant", "four five six seven")]
    messages = [{"role": role, "content": content} for role, content in turns]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    _, documents = documents_of(target, tmp_path / "rows.jsonl", tmp_path / "cache")
    reader = TargetReader(load_target(target), [1])
    own = [(prompt, own_answer(reader, prompt, 40)) for prompt, _ in documents]
    folder = teach(
        target,
        own,
        tmp_path / "drafter",
        config=DrafterConfig(num_layers=2, block_size=6),
        mask_token_id=TABLE_ROWS - 1,
        steps=40,
    )
    row = evaluate(
        EvaluateConfig(
            drafter=str(folder),
            target=str(target),
            data=str(tmp_path / "rows.jsonl"),
            generate=True,
            max_new_tokens=40,
            decode=True,
        )
    )
    assert row["lossless"] is True
    assert row["documents"] == 1
    assert row["accept_length_decode"] == row["accept_length_walk"] > 1.5


def test_answers_of_others_are_kept_apart_and_never_decoded(served):
    row = evaluate(
        EvaluateConfig(run=str(served / "run"), data=str(served / "mixed.jsonl"), decode=True)
    )
    assert (row["documents"], row["documents_on_text"]) == (1, 2)
    assert row["walk_on_text"] < row["accept_length_walk"] == row["accept_length_decode"]


def test_the_target_answers_anew_if_asked(served):
    """From prompts alone it comes to the same answers, so to the same figures."""
    options = EvaluateConfig(
        run=str(served / "run"), data=str(served / "mixed.jsonl"), generate=True, max_new_tokens=200
    )
    own = evaluate(EvaluateConfig(run=str(served / "run")))
    anew = evaluate(options)
    assert anew["documents"] == 3
    assert anew["accept_length_walk"] == own["accept_length_walk"]
    assert anew["lossless"] is None, "nothing was decoded"


def test_at_a_temperature_there_is_an_accept_length_but_no_text_to_equal(served):
    row = evaluate(
        EvaluateConfig(run=str(served / "run"), decode=True, temperature=1.0, documents=1)
    )
    assert row["lossless"] is None
    assert 1 <= row["accept_length_decode"] <= 8


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_the_last_line_is_json(served, monkeypatch, capsys):
    """The program itself, by hand-given folders; its exit code says that nothing was lost."""
    words = [f"drafter={served}/run/export", f"target={DEMO}/target", f"data={served}/own.jsonl"]
    monkeypatch.setattr(sys, "argv", ["evaluate", *words, "documents=1", "decode=true"])
    monkeypatch.chdir(served)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("dflash_ddp.evaluate", run_name="__main__")
    assert ended.value.code == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    keys = "accept_length_walk accept_length_decode lossless tokens_per_target_call speedup"
    assert set(keys.split()) < set(row)
    assert row["documents"] == 1


def test_what_is_given_goes_before_what_the_run_says(served):
    run = str(served / "run")
    config, folder = run_config(EvaluateConfig(run=run))
    assert (config.target.path, folder) == (str(DEMO / "target"), served / "run" / "export")
    assert config.data.enable_thinking is None
    options = EvaluateConfig(run=run, target="a", drafter="b", data="c", enable_thinking=False)
    config, folder = run_config(options)
    assert (config.target.path, folder, config.data.heldout) == ("a", Path("b"), "c")
    assert config.data.enable_thinking is False


def test_what_is_missing_or_wrong_is_named(served, tmp_path):
    with pytest.raises(ConfigError, match="give run=<dir>, or drafter=<dir>"):
        run_config(EvaluateConfig(drafter="somewhere"))
    with pytest.raises(ConfigError, match=r"temperature=-1\.0 must be >= 0"):
        run_config(EvaluateConfig(run=str(served / "run"), temperature=-1.0))
    with pytest.raises(ConfigError, match="did you mean documents"):
        command_line(EvaluateConfig, ["document=3"])
    with pytest.raises(ConfigError, match="documents"):
        command_line(EvaluateConfig, ["documents=some"])
    with pytest.raises(ConfigError, match="key=value; keys: run, drafter"):
        command_line(EvaluateConfig, ["--run"])
    (tmp_path / "config.yaml").write_text((served / "run" / "config.yaml").read_text())
    with pytest.raises(ConfigError, match="neither export/ nor a checkpoint"):
        run_config(EvaluateConfig(run=str(tmp_path)))
