"""What all ranks must agree on before they build a run."""

from datetime import datetime

import pytest
from test_store import TEMPLATE, make, make_tokenizer, row, write
from transformers.utils import chat_template_utils

from dflash_ddp.config import ConfigError
from dflash_ddp.texts import check_same_documents


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
