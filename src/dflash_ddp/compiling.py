"""torch.compile in this project: from the main thread only, never silently off, and cached for the next start.

PyTorch marks "somebody is tracing" by process-wide flags, so one thread's compilation or FX trace breaks or
misleads compiled code in another. Here every process has one role and calls compiled or traced code from its main
thread alone; `require_main_thread` keeps it so.
"""

import os
import threading
from pathlib import Path

import torch


def require_main_thread(what: str) -> None:
    """Refuse to run compiled or traced code anywhere but in the main thread.

    Raises:
        RuntimeError: called from another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            f"{what} was called from thread {threading.current_thread().name!r}; compiled and "
            "traced code runs in the main thread only, because PyTorch's tracing flags are "
            "process-wide"
        )


def require_compiler() -> None:
    """Refuse to start on a GPU when torch.compile is switched off.

    Raises:
        RuntimeError: dynamo is disabled; flex attention would then materialise every score.
    """
    import torch._dynamo.config as dynamo

    if dynamo.disable or os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        raise RuntimeError(
            "torch.compile is switched off (TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE is set): "
            "flex attention would run densely and need hundreds of GiB; unset the variable"
        )
    dynamo.suppress_errors = False


def cache_directory() -> Path:
    """Folder of compiled code for this user, by versions of torch and GPU."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    versions = [f"torch{torch.__version__}"]
    if torch.cuda.is_available():
        versions.append(torch.cuda.get_device_name(0).replace(" ", "-"))
    return Path(root) / "dflash_ddp" / "-".join(versions)


def use_cache() -> bool:
    """Keep compiled code in `cache_directory`; whether it held any (a warm start).

    Variables that the user has set win. Call before anything is compiled.
    """
    folder = cache_directory()
    warm = folder.is_dir() and any(folder.iterdir())
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
    os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "1")
    return warm
