"""PyTorch's tracing flags belong to the whole process: why each role has a process, and one thread for compiled code.

One thread stands still inside `torch.fx.symbolic_trace`, as any thread does now and then that compiles or
traces. Up to torch 2.13 a compiled function that another thread calls meanwhile raises, though it was
compiled long before. The same trace in another process disturbs nobody.
"""

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dflash_ddp.compiling import require_main_thread
from dflash_ddp.drafter.step import draft
from dflash_ddp.target.worker import FeatureSource

PER_THREAD = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)
LIMIT_S = 60


def standing_still(inside: Any, go_on: Any) -> None:
    """Trace a function that waits half-way. The events are of threads or of processes."""

    def traced(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert go_on.wait(LIMIT_S)
        return x + 1

    torch.fx.symbolic_trace(traced)


@contextmanager
def tracing(worker: Callable[..., Any], inside: Any, go_on: Any) -> Iterator[None]:
    """Somebody is in the middle of a trace."""
    tracer = worker(target=standing_still, args=(inside, go_on), daemon=True)
    tracer.start()
    try:
        assert inside.wait(LIMIT_S)
        yield
    finally:
        go_on.set()
        tracer.join(LIMIT_S)
        assert not tracer.is_alive()


@pytest.fixture(params=["eager", "aot_eager"])
def compiled(request) -> Iterator[Callable]:
    """A function that is compiled already."""
    function = torch.compile(lambda x: torch.sin(x) * 2, backend=request.param)
    x = torch.ones(3)
    assert torch.equal(function(x), torch.sin(x) * 2)
    yield function
    assert torch.equal(function(x), torch.sin(x) * 2), "afterwards all is well again"
    torch.compiler.reset()


def test_a_trace_in_another_thread_breaks_compiled_code(compiled):
    with tracing(threading.Thread, threading.Event(), threading.Event()):
        if PER_THREAD:
            compiled(torch.ones(3))
        else:
            with pytest.raises(RuntimeError, match="using FX to symbolically trace"):
                compiled(torch.ones(3))


@pytest.mark.dist
def test_a_trace_in_another_process_does_not(compiled):
    context = multiprocessing.get_context("forkserver")
    with tracing(context.Process, context.Event(), context.Event()):
        assert torch.equal(compiled(torch.ones(3)), torch.sin(torch.ones(3)) * 2)


def call_in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1, thread_name_prefix="helper") as pool:
        return pool.submit(function).result(LIMIT_S)


def test_main_thread_is_required():
    require_main_thread("the model")
    with pytest.raises(RuntimeError, match="the model was called from thread 'helper_0'"):
        call_in_thread(lambda: require_main_thread("the model"))


def untouchable(what: str) -> Any:
    """Something whose first use would show that the thread was looked at too late."""

    class Untouchable:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{what}.{name} was used")

        def __call__(self, *arguments: Any) -> Any:
            raise AssertionError(f"{what} was called")

    return Untouchable()


def test_drafter_and_target_refuse_other_threads_before_anything_else():
    names = ("model", "tables", "features", "inputs")
    with pytest.raises(RuntimeError, match="the drafter was called from thread"):
        call_in_thread(lambda: draft(*(untouchable(name) for name in names)))
    source = object.__new__(FeatureSource)
    with pytest.raises(RuntimeError, match="the target was called from thread"):
        call_in_thread(lambda: source.features(untouchable("batch"), torch.empty(0)))
