"""Every test, or file of tests, that the docs name is there."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCS = sorted((TESTS.parent / "docs").glob("*.md"))
SPLIT_OF_A_DATA_SET = {"test_sft"}  # docs/configuration.md: a value, no test


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_named_tests_exist(doc):
    sources = "\n".join(file.read_text() for file in TESTS.rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", doc.read_text())) - SPLIT_OF_A_DATA_SET
    files = {file.stem for file in TESTS.rglob("test_*.py")}
    assert not {name for name in named - files if f"def {name}(" not in sources}
