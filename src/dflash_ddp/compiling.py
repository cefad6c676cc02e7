"""torch.compile in this project: from the main thread only, never silently off, and cached for the next start.

PyTorch marks "somebody is tracing" by process-wide flags, so one thread's compilation or FX trace breaks or
misleads compiled code in another. Here every process has one role and calls compiled or traced code from its main
thread alone; `require_main_thread` keeps it so.
"""

import fcntl
import gc
import hashlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import torch
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

logger = logging.getLogger(__name__)


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
    """Folder of compiled code for this user, by versions and GPU."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    versions = [f"torch{torch.__version__}", f"transformers{version('transformers')}"]
    if torch.cuda.is_available():
        versions.append(torch.cuda.get_device_name(0).replace(" ", "-"))
    return Path(root) / "dflash_ddp" / "-".join(versions)


def use_cache() -> Path:
    """Keep compiled code in `cache_directory`, or for this process only where nobody may write.

    Variables that the user has set win. Call before anything is compiled.
    """
    folder = cache_directory()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        logger.warning("compiled code is not kept for the next start: %s", error)
        folder = Path(tempfile.mkdtemp(prefix="dflash_ddp-"))
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") == default_cache_dir():
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]  # torch has filled it in, not the user
    for name, value in {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }.items():
        os.environ.setdefault(name, value)
    return folder


def compile_now(what: str, graphs: str, run: Callable[[], None]) -> None:
    """Compile by running once: of a node's processes that need the same code, one compiles.

    The others wait and read from the cache. PyTorch keys compiled code by the index of the GPU: ranks
    share it because each sees its own GPU only, as number 0 (`world.set_gpu_variables`).

    Losing or breaking the cache costs time only: what cannot be read is compiled again.

    Args:
        what: for the log.
        graphs: names all that decides what is compiled; equal for ranks that compile the same.
        run: calls the compiled code with its real shapes.
    """
    require_main_thread(what)
    start, before = time.monotonic(), _cache_counts()
    if torch.cuda.is_available():  # ranks that share GPUs may have other numbers
        graphs += f" cuda:{torch.cuda.current_device()}"
    key = hashlib.sha256(graphs.encode()).hexdigest()[:16]
    with _turn_to_compile(use_cache(), key):
        failed, empty = None, _cache_is_empty()
        try:
            run()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if empty:
                raise  # nothing came from the cache, so it is not to blame
            failed = str(error)  # not the error: its trace holds what the first try had on the GPU
        if failed is not None:
            logger.warning("with what the cache holds, this fails (%s): compiling again", failed)
            folder = tempfile.mkdtemp(prefix="dflash_ddp-")
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
            os.environ["TRITON_CACHE_DIR"] = f"{folder}/triton"
            torch.compiler.reset()
            gc.collect()
            before = _cache_counts()
            run()
    read, made = (after - b for after, b in zip(_cache_counts(), before, strict=True))
    logger.info(
        "compiled code of %s: cache %s, %d graphs read, %d compiled, %.1f s",
        what,
        "miss" if made else "hit",
        read,
        made,
        time.monotonic() - start,
    )


def _cache_counts() -> tuple[int, int]:
    """Graphs read from the cache, and compiled, in this process so far."""
    found = counters["inductor"]
    made = found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"]
    return found["fxgraph_cache_hit"], made


def _cache_is_empty() -> bool:
    """Whether all will be compiled here and now. Of what torch reads, it counts whole graphs alone."""
    folders = (Path(os.environ[f"{name}_CACHE_DIR"]) for name in ("TORCHINDUCTOR", "TRITON"))
    return not any(folder.is_dir() and any(folder.iterdir()) for folder in folders)


@contextmanager
def _turn_to_compile(folder: Path, key: str) -> Iterator[None]:
    """Alone until somebody has compiled `key` on this machine; together after that."""
    done = folder / f"{key}.done"
    if done.exists():
        yield
        return
    with (folder / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released if its holder dies
        if done.exists():
            fcntl.flock(lock, fcntl.LOCK_UN)
        yield
        done.touch()
