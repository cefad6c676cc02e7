"""Settings for all tests: quiet, offline, two threads, and nobody looks up names on a network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
