"""A whole run with credentials all around it: none is in what it prints or leaves behind."""

import json
import os
import pty
import subprocess
import sys

import pytest
from runs import SOURCE, run
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
    "name='odd,name:1' logging=offline tokens_per_batch=128 steps=2 device=cpu split=1t1d"
).split()
FILES = "config.yaml data_report.json env.json metrics.jsonl".split()


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
    """One row for two ranks: it is repeated. The run trains, and says what it reads twice."""
    ended = run(2, SMALL)
    assert "PLANTED" not in ended.output
    assert planted(place) == []
    assert "steps=2 loss=" in ended.output
    assert "1 of the 1 held-out documents used are in the training text" in ended.output
    left = {file.name for file in (place / "outputs/odd,name:1").iterdir()}
    assert left >= set(FILES)
    assert not [name for name in left if name.startswith(".")]  # as Hydra's
    assert [folder.name for folder in (place / "outputs").iterdir()] == ["odd,name:1"]
    report = json.loads((place / "outputs/odd,name:1/data_report.json").read_text())
    assert report["heldout"]["num_in_training_text"] == report["text"]["num_documents"] == 1


ASK = """
import sys
from dflash_ddp.config import Config
from dflash_ddp.train import run_rank
before = sys.stdin.isatty()
try:
    run_rank(Config())  # eight ranks are asked for, and one is there
except SystemExit as end:
    print("asked:", before, sys.stdin.isatty(), repr(sys.stdin.read()), end.code)
"""


def test_a_rank_at_a_terminal_cannot_be_held_up_by_a_question():
    """wandb, online without a key, asks for one if there is a terminal to answer."""
    child, terminal = pty.fork()
    if child == 0:
        env = os.environ | {"PYTHONPATH": str(SOURCE), "RANK": "0", "WORLD_SIZE": "1"}
        env |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        os.execve(sys.executable, [sys.executable, "-c", ASK], env)
    said = b""
    try:
        while part := os.read(terminal, 4096):
            said += part
    except OSError:  # how the end of a terminal reads
        pass
    os.waitpid(child, 0)
    assert b"asked: True False '' 2" in said, said
