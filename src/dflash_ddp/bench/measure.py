"""How benchmarks measure: wall time around an idle device, the chip's product rates, compilations, questions asked."""

import os
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._dynamo.utils as dynamo

from dflash_ddp.config import Dtype
from dflash_ddp.preflight import torch_dtype

GIB = 2**30
Product = tuple[int, int, int, int]
"""(rows, inner, columns, how often)."""


def this_device() -> torch.device:
    """The first GPU, if there is one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(step: Callable[[], Any], device: torch.device) -> float:
    """Wall time of one call, from an idle device to an idle device."""
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def alternate(
    steps: dict[str, Callable[[], Any]], device: torch.device, *, repeats: int
) -> dict[str, list[float]]:
    """Milliseconds of each step, taken in turn, so that all see the same temperature and clock."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            times[name].append(milliseconds(step, device))
    return times


def spread(times: list[float]) -> dict[str, float]:
    """Median, least and most of some milliseconds."""
    return {
        "ms": round(statistics.median(times), 1),
        "ms_min": round(min(times), 1),
        "ms_max": round(max(times), 1),
    }


def questions(step: Callable[[], Any], device: torch.device) -> dict[str, int]:
    """How often one call waits for the GPU and compiles anew: both 0 in a steady step."""
    before = dynamo.counters["stats"]["unique_graphs"]
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    asked = sum("called a synchronizing" in str(warning.message) for warning in heard)
    after = dynamo.counters["stats"]["unique_graphs"]
    return {"host_synchronisations": asked, "recompilations": after - before}


def compile_seconds(first: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Seconds of the first call with an empty cache on disk, and again from what it left there."""
    kept = {name: os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    found = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name in kept:
            os.environ[name] = f"{folder}/{name}"
        for name in ("compile_cold_s", "compile_warm_s"):
            torch.compiler.reset()
            found[name] = round(milliseconds(first, device) / 1e3, 1)
        for name, value in kept.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    return found


def product_ms(m: int, k: int, n: int, device: torch.device) -> float:
    """Median milliseconds of one product [m, k] x [n, k]^T on random data."""
    dtype = torch_dtype(Dtype.auto, device.type)
    a = torch.randn(m, k, device=device, dtype=dtype)
    b = torch.randn(n, k, device=device, dtype=dtype)
    for _ in range(2):
        a @ b.T
    return statistics.median(milliseconds(lambda: a @ b.T, device) for _ in range(3))


def product_shares(
    products: Iterable[Product], median_ms: float, device: torch.device
) -> dict[str, float]:
    """A step beside the chip's rate on one large product, and beside its own products alone."""
    products = list(products)
    flops = sum(2.0 * m * k * n * often for m, k, n, often in products)
    size = 8192 if device.type == "cuda" else 512
    ceiling = 2 * size**3 / product_ms(size, size, size, device) / 1e9
    alone = sum(product_ms(m, k, n, device) * often for m, k, n, often in products)
    return {
        "tflops": round(flops / median_ms / 1e9, 3),
        "ceiling_tflops": round(ceiling, 3),
        "share_of_ceiling": round(flops / median_ms / 1e9 / ceiling, 3),
        "products_alone_ms": round(alone, 1),
        "share_of_products_alone": round(alone / median_ms, 3),
    }


def peak_gib(device: torch.device) -> float:
    """Most memory allocated since the last `reset_peak`; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    return round(torch.cuda.max_memory_allocated(device) / GIB, 1)


def memory_mib(device: torch.device) -> float:
    """In use on the GPU, by whomever and for whatever; on a CPU the most that this process has used."""
    if device.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 2**20


def reset_peak(device: torch.device) -> None:
    """Forget the peak, and give cached memory back."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
