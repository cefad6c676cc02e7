"""A whole run with credentials all around it: none is in what it prints or leaves behind."""

import json
import subprocess

import pytest
from runs import run
from targets import build_target

pytestmark = pytest.mark.dist

CREDENTIALS = {
    "WANDB_API_KEY": "0123456789PLANTEDabcdef0123456789abcdef0",
    "HF_TOKEN": "hf_PLANTEDabcdefghijklmnop",
    "AWS_ACCESS_KEY_ID": "AKIAPLANTED123456789",
    "AWS_SECRET_ACCESS_KEY": "wJalrPLANTED/K7MDENG",
    "MY_PASSWORD": "correct-PLANTED-horse",
}
SMALL = (
    "target=demo target.path=target data=demo data.path=train.jsonl data.heldout=train.jsonl data.cache_dir=cache "
    "data.max_length=128 drafter.num_layers=2 drafter.block_size=4 drafter.num_anchors=8 drafter.sliding_layers=0 "
    "drafter.num_attention_heads=null drafter.num_key_value_heads=null drafter.head_dim=null loss.chunk_rows=16 "
    "logging=offline tokens_per_batch=128 steps=2 batches_per_step=2 device=cpu split=1t1d split.drafters=2"
).split()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A git repository with one row of text, whose remote's address holds a token."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    remote = f"https://{CREDENTIALS['HF_TOKEN']}@github.com/me/x.git"
    subprocess.run(["git", "-C", tmp_path, "remote", "add", "origin", remote], check=True)
    build_target("qwen3_tied", tmp_path / "target")
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "one row"}]
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": turns}))
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planted(place) -> list[str]:
    files = [file for file in place.rglob("*") if file.is_file() and ".git" not in file.parts]
    assert any(file.name.endswith(".wandb") for file in files)
    return [str(file) for file in files if b"PLANTED" in file.read_bytes()]


def test_no_credential_is_printed_or_written_and_one_row_is_enough(place):
    """One row for three ranks: it is repeated. The run trains, and says what it reads twice."""
    ended = run(3, SMALL)
    assert "PLANTED" not in ended.output
    assert planted(place) == []
    assert "steps=2 loss=" in ended.output
    assert "1 of the 1 held-out documents used are in the training text" in ended.output
    report = json.loads((place / "outputs/dev/data_report.json").read_text())
    assert report["heldout"]["num_in_training_text"] == report["text"]["num_documents"] == 1
