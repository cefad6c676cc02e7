"""torch.compile is never silently off."""

import pytest
import torch._dynamo.config as dynamo

from dflash_ddp.compiling import cache_directory, require_compiler


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
