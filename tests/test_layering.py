"""Who may import whom, and how large a file may grow."""

import ast
import subprocess
import sys
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


WATCH = """
import sys
import torch
def refuse(name):
    def call(*args, **kwargs):
        raise AssertionError(f"torch.cuda.{name} is called at import")
    return call
for name in ("is_available", "_lazy_init", "get_device_name", "get_device_properties", "current_device"):
    setattr(torch.cuda, name, refuse(name))
"""


def test_what_ranks_import_leaves_cuda_asleep():
    """A rank chooses its GPU after these imports, and a process that has woken CUDA cannot fork any.

    Qwen3.5's module asks for the GPU's name at import, where flash-linear-attention is installed.
    """
    programs = (
        "training, dflash_ddp.target.worker, dflash_ddp.bench.lane, dflash_ddp.bench.pipeline"
    )
    code = f"{WATCH}\nimport {programs}\nassert not any('modeling_qwen3_5' in name for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
