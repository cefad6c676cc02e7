"""Settings for all tests: quiet, offline, one thread, and nobody looks up names on a network."""

import gc
import os
import signal

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # equal sums in all processes
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
# A shell's background job ignores Ctrl-C, and so would all that tests start and then interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish():
    """Imports stay to the end: to look through them for garbage, again and again, takes time from all tests."""
    gc.freeze()


@pytest.fixture(scope="session")
def material(tmp_path_factory):
    """Target, text and a place for small runs."""
    from material import make_material

    return make_material(tmp_path_factory.mktemp("runs"))
