"""What all ranks must agree on before they build a run."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

import pytest
from test_store import TEMPLATE, make, make_tokenizer, row, write
from torch.distributed import TCPStore
from training import compose_config
from transformers.utils import chat_template_utils

from dflash_ddp import jobstore
from dflash_ddp.config import ConfigError
from dflash_ddp.folder import claim_folder
from dflash_ddp.jobstore import JobStore
from dflash_ddp.startup import CLAIMED, goes_on
from dflash_ddp.texts import check_same_documents
from dflash_ddp.world import read_launch


def test_nodes_must_have_the_same_documents():
    """A cache may lie elsewhere on each node; its name is the hash of what decides its content."""

    def place(path, content="x"):
        return {"path": path, "content": content}

    rank_0 = {"text": place("/a/cache/123"), "heldout": place("/a/cache/8")}
    check_same_documents({"text": place("/b/other/123"), "heldout": None}, rank_0)
    with pytest.raises(ConfigError, match=r"data \(text\): .*/b/456, .*/a/cache/123: files or"):
        check_same_documents({"text": place("/b/456"), "heldout": None}, rank_0)
    with pytest.raises(ConfigError, match=r"data \(heldout\): .*/b/7"):
        check_same_documents({"text": place("/b/123"), "heldout": place("/b/7")}, rank_0)
    with pytest.raises(ConfigError, match=r"data \(text\): .* other tokens, .* prints the date"):
        check_same_documents({"text": place("/b/123", "y"), "heldout": None}, rank_0)


def test_a_template_that_prints_the_date_is_seen(tmp_path, monkeypatch):
    """As some released ones do: on two days the same text has other tokens, under one name."""
    days = [1]

    class Day(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, days[-1])

    monkeypatch.setattr(chat_template_utils, "datetime", Day)
    dated = make_tokenizer("{{ strftime_now('%d %b %Y') }}" + TEMPLATE)
    path = write(tmp_path / "a.jsonl", row())
    first, again = (make(path, tokenizer=dated, cache_dir=tmp_path / name) for name in "ab")
    days.append(2)
    later = make(path, tokenizer=dated, cache_dir=tmp_path / "c")
    assert first.fingerprint == later.fingerprint
    assert first.content == again.content != later.content


def begin(server, restart_count=0, rank=0):
    env = {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    env |= {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": str(restart_count)}
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    launch = read_launch(env)
    return launch, JobStore(launch)


def test_ranks_of_one_start_find_each_other_and_nothing_of_the_last(monkeypatch):
    """In any order, whatever torchrun counts on each node."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(ranks, counts):
        with ThreadPoolExecutor() as pool:
            starts = []
            for rank, count in zip(ranks, counts, strict=True):
                starts.append(pool.submit(begin, server, count, rank))
                time.sleep(0.1)
            return [found.result()[1].control for found in starts]

    one, *_ = start([1, 2, 0], [0, 0, 0])
    one.set("abort", "the first cause")
    stores = start([2, 1, 0], [0, 0, 1])
    assert not any(store.check(["abort"]) for store in stores)
    stores[0].set("here", "")
    assert all(store.check(["here"]) for store in stores)
    assert not one.check(["here"])
    start([1, 0], [0, 1])  # rank 2 dies before it reaches the store
    late, *others = start([2, 1, 0], [3, 3, 3])
    late.set("here", "")
    assert all(store.check(["here"]) for store in others)
    monkeypatch.setattr(jobstore, "START_LIMIT", timedelta(seconds=0.1))
    with pytest.raises(TimeoutError, match="rank 1: rank 0 has not started within "):
        begin(server, rank=1)


def test_a_restart_is_known_also_where_torchrun_does_not_count_it(tmp_path):
    """So resume=none is anew in each launch, and not in each restart; launches may share an id."""
    config = compose_config(["resume=none", f"output_dir={tmp_path / 'run'}"])

    one, two = (TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in "ab")
    launch, store = begin(one)
    assert not goes_on(config, launch, store)
    claim_folder(config, {}, launch.run_id)
    assert not goes_on(config, launch, store)
    store.launch.set(CLAIMED, "")
    assert goes_on(config, *begin(one))
    assert goes_on(config, *begin(two, restart_count=1))
    assert not goes_on(config, *begin(two))
    claim_folder(config, {}, "another")
    assert not goes_on(config, *begin(one))
