"""What all ranks must agree on before they build a run."""

import pytest

from dflash_ddp.config import ConfigError
from dflash_ddp.texts import check_same_documents


def test_nodes_must_have_the_same_documents():
    """A cache may lie elsewhere on each node; its name is the hash of what it holds."""
    rank_0 = {"text": "/a/cache/123", "heldout": None}
    check_same_documents({"text": "/b/other/123", "heldout": None}, rank_0)
    with pytest.raises(ConfigError, match=r"data \(text\): .*/b/456, .*/a/cache/123"):
        check_same_documents({"text": "/b/456", "heldout": None}, rank_0)
    with pytest.raises(ConfigError, match=r"data \(heldout\): .*/b/7"):
        check_same_documents({"text": "/b/123", "heldout": "/b/7"}, rank_0)
