"""Settings for all tests: quiet, offline, one thread, and nobody looks up names on a network."""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # equal sums in all processes
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture(scope="session")
def material(tmp_path_factory):
    """Target, text and a place for small runs."""
    from material import make_material

    return make_material(tmp_path_factory.mktemp("runs"))
