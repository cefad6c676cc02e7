"""torch.compile is never silently off, and compiled once for all processes of a machine."""

import os
import subprocess
import sys

import pytest
import torch._dynamo.config as dynamo

from dflash_ddp.compiling import cache_directory, compile_now, require_compiler


def test_a_switched_off_compiler_is_refused(monkeypatch):
    require_compiler()
    with monkeypatch.context() as patch:
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        with pytest.raises(RuntimeError, match="TORCH_COMPILE_DISABLE"):
            require_compiler()
    with dynamo.patch(disable=True), pytest.raises(RuntimeError, match="switched off"):
        require_compiler()
    assert dynamo.suppress_errors is False


def test_cache_is_kept_by_user_and_version(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cache_directory()
    assert folder.parent == tmp_path / "dflash_ddp"
    assert "torch" in folder.name


def test_what_fails_is_tried_again_only_if_the_cache_may_be_to_blame(monkeypatch, tmp_path):
    folder, tries = tmp_path / "inductor", []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    for name in ("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_AUTOGRAD_CACHE"):
        monkeypatch.setenv(name, "1")

    def fail():
        tries.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        raise ValueError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        compile_now("a function", "one", fail)
    assert tries == [str(folder)]
    folder.mkdir()
    (folder / "code.py").write_text("cut off (")
    with pytest.raises(ValueError, match="no such kernel"):
        compile_now("a function", "two", fail)
    assert len(tries) == 3
    assert tries[1] == str(folder) != tries[2]


PROGRAM = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s")
import torch
import torch._inductor.cpu_vec_isa as isa
from dflash_ddp.compiling import compile_now

isa.valid_vec_isa_list = list  # six trial compilations would find them, and prove nothing here

@torch.compile(fullgraph=True)
def scaled(x):
    return torch.sin(x) * 2 + x

x = torch.arange(64.0)
compile_now("a function", "scaled", lambda: scaled(x))
assert torch.allclose(scaled(x), torch.sin(x) * 2 + x)
"""


def start(cache):
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):  # this process may have compiled
        environment.pop(name, None)
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def said(process):
    _, text = process.communicate(timeout=400)
    assert process.returncode == 0, text
    return text


def test_one_process_compiles_and_the_others_read(tmp_path):
    """Two at once: one compiles. A later start reads. A broken cache costs time only."""
    texts = [said(p) for p in [start(tmp_path), start(tmp_path)]]
    assert sorted("cache miss" in text for text in texts) == [False, True]
    assert sorted("cache hit, 1 graphs read, 0 compiled" in text for text in texts) == [False, True]
    assert "cache hit, 1 graphs read, 0 compiled" in said(start(tmp_path))
    for file in [f for f in tmp_path.rglob("*") if f.is_file() and f.suffix != ".done"]:
        file.write_bytes(file.read_bytes()[:40])
    assert "1 compiled" in said(start(tmp_path))


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path):
    (tmp_path / "file").write_text("no folder")
    text = said(start(tmp_path / "file"))
    assert "not kept for the next start" in text
    assert "cache miss, 0 graphs read, 1 compiled" in text
