"""Who may import whom, and how large a file may grow."""

import ast
from pathlib import Path

import pytest

import dflash_ddp

PACKAGE = Path(dflash_ddp.__file__).parent
FILES = sorted(p for p in PACKAGE.rglob("*.py"))


def imported(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("file", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_rules(file):
    names, part = imported(file), file.relative_to(PACKAGE).parts[0]
    if part == "data":
        assert not any(n.startswith(("dflash_ddp.target", "dflash_ddp.drafter")) for n in names)
    if part == "target":
        assert not any(n.startswith("dflash_ddp.drafter") for n in names)
    if part == "drafter" and file.name != "worker.py":
        assert not any(n.startswith("dflash_ddp.target") for n in names)
    if part in ("target", "drafter") and file.name not in ("worker.py", "steplog.py"):
        assert not any(n.startswith(("torch.distributed", "dflash_ddp.world")) for n in names)
    if file.name in ("config.py", "settings.py", "schedule.py", "accept.py", "batch.py"):
        assert not any(n.split(".")[0] == "torch" for n in names)
    tree = ast.parse(file.read_text())
    if file.read_text().strip():
        assert ast.get_docstring(tree), "a file opens with its story"


@pytest.mark.parametrize("file", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_sizes(file):
    lines = file.read_text().splitlines()
    assert len(lines) <= 400, "split it where a reader would"
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 65, f"{node.name} is too long"
