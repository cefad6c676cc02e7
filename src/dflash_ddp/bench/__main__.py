"""`python -m dflash_ddp.bench drafter|target|lane|stream|pipeline [key=value ...]`: one JSON row.

    drafter    forward, backward and optimizer step of one microbatch
    target     capture of context features, beside the plain transformers call
    lane       one transfer between two GPUs, and what it takes from their compute
    stream     the channel with compute that only takes its time: its rate beside the ideal one
    pipeline   real training with random target weights: its rate beside those of its parts alone

Times the code that training runs, on random weights and tokens of the real shapes. Every share and ratio is taken in
one run. `workload` is headline, 8b or tiny; without a GPU `tiny` proves that the benchmark works.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from operator import attrgetter
from typing import Any

import torch
import transformers

from dflash_ddp.bench.drafter import DrafterOptions, bench_drafter
from dflash_ddp.bench.lane import LaneOptions, bench_lane
from dflash_ddp.bench.measure import this_device
from dflash_ddp.bench.options import read_options, split_settings
from dflash_ddp.bench.pipeline import PipelineOptions, bench_pipeline
from dflash_ddp.bench.stream import StreamOptions, bench_stream
from dflash_ddp.bench.target import TargetOptions, bench_target
from dflash_ddp.bench.workloads import WORKLOADS
from dflash_ddp.config import ConfigError
from dflash_ddp.log import USER_ERROR, tell
from dflash_ddp.usage import value_text

BENCHES: dict[str, tuple[type[Any], Callable[..., dict[str, Any]]]] = {
    "drafter": (DrafterOptions, bench_drafter),
    "target": (TargetOptions, bench_target),
    "lane": (LaneOptions, bench_lane),
    "stream": (StreamOptions, bench_stream),
    "pipeline": (PipelineOptions, bench_pipeline),  # also takes settings of the training command
}


def to_json(value: object) -> str:
    """An enum as its value."""
    return json.dumps(value, default=attrgetter("value"))


def usage() -> str:
    """Every benchmark with its options and their defaults, a line each."""
    lines = []
    for name, (schema, _) in BENCHES.items():
        defaults = asdict(schema()).items()
        lines.append(
            f"  {name} {' '.join(f'{key}={value_text(value)}' for key, value in defaults)}"
        )
    return "\n".join([*lines, f"workload is one of {', '.join(WORKLOADS)}"])


def main() -> None:
    """Run one benchmark and print its row."""
    what, *words = sys.argv[1:] or [""]
    if what in ("--help", "-h"):
        sys.stdout.write(f"{(__doc__ or '').strip()}\n\n{usage()}\n")
        raise SystemExit(0)
    if what not in BENCHES:
        tell(f"there is no benchmark {what!r}; there are, with their defaults:\n{usage()}")
        raise SystemExit(USER_ERROR)
    schema, bench = BENCHES[what]
    own, settings = split_settings(schema, words) if what == "pipeline" else (words, [])
    try:
        options = read_options(schema, own)
    except ConfigError as error:
        tell(error)
        raise SystemExit(USER_ERROR) from None
    device = this_device()
    row: dict[str, object] = {"bench": what, **asdict(options)}
    row |= {key: value for key, _, value in (word.partition("=") for word in settings)}
    row |= {"torch": torch.__version__, "transformers": transformers.__version__}
    row["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    sys.stdout.write(to_json(row | bench(options, *settings)) + "\n")


if __name__ == "__main__":
    main()
