"""Every test, or file of tests, that the docs name is there."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCS = sorted((TESTS.parent / "docs").glob("*.md"))
SPLIT_OF_A_DATA_SET = "test_sft"  # docs/configuration.md: a value, no test
NAME = re.compile(r"`(?:(test_\w+)::)?(test_\w+)(\.\.\.)?`")
SOURCES = {file.stem: file.read_text() for file in TESTS.rglob("test_*.py")}


def is_there(file: str, name: str, more: str) -> bool:
    """`file::name`, or a name alone: of a test in any file, or of a file. "..." stands for the rest of a test's."""
    texts = [SOURCES.get(file, "")] if file else SOURCES.values()
    test = re.compile(rf"^def {name}" + (r"\w" if more else r"\("), re.MULTILINE)
    is_file = not file and not more and name in SOURCES
    return is_file or any(test.search(text) for text in texts)


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_named_tests_exist(doc):
    text = doc.read_text()
    named = [name for name in NAME.findall(text) if name[1] != SPLIT_OF_A_DATA_SET]
    assert len(named) >= text.count("`test_") - text.count(f"`{SPLIT_OF_A_DATA_SET}`")
    assert not [name for name in named if not is_there(*name)]


def test_names_that_are_not_there_are_seen():
    for text, there in {
        "`test_doc_names::test_named_tests_exist`": True,
        "`test_doc_names::test_named_...`": True,
        "`test_doc_names`": True,
        "`test_doc_names::test_gone`": False,
        "`test_layering::test_named_...`": False,
        "`test_named_tests_exist...`": False,
        "`test_gone_...`": False,
        "`test_gone`": False,
    }.items():
        (name,) = NAME.findall(text)
        assert is_there(*name) == there, text
