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

import torch
import transformers

from dflash_ddp.bench.drafter import bench_drafter
from dflash_ddp.bench.lane import bench_lane
from dflash_ddp.bench.pipeline import bench_pipeline
from dflash_ddp.bench.stream import bench_stream
from dflash_ddp.bench.target import bench_target
from dflash_ddp.bench.workloads import WORKLOADS
from dflash_ddp.config import LossConfig, Recompute

OPTIONS = {
    "drafter": {
        "workload": "tiny",
        "repeats": "5",
        "chunk_rows": str(LossConfig().chunk_rows),
        "recompute": "auto",
    },
    "target": {"workload": "tiny", "repeats": "5"},
    "lane": {"workload": "none", "gib": "1", "ctas": "4,1,2,8,default", "repeats": "5"},
    "stream": {
        "targets": "2",
        "drafters": "1",
        "target_ms": "40",
        "drafter_ms": "20",
        "slow_factor": "1",
        "jitter": "0",
        "mib": "1",
        "items": "200",
    },
    "pipeline": {"workload": "tiny", "split": "1t1d", "steps": "12", "parts": "true"},
}


def read_options(what: str, pairs: list[str]) -> dict[str, str]:
    """The defaults of a benchmark, changed by `key=value` pairs.

    Raises:
        SystemExit: an unknown benchmark, key or workload; the text says what there is.
    """
    known = OPTIONS.get(what, {})
    given = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    options = {**known, **given}
    free = what == "pipeline"  # further pairs are settings of the training command
    bad = [pair for pair in pairs if "=" not in pair or not (free or pair.split("=")[0] in known)]
    workloads = [*WORKLOADS, "none"] if what == "lane" else [*WORKLOADS]
    if not known or bad or options.get("workload", "tiny") not in workloads:
        lines = [
            f"  {name} {' '.join(f'{k}={v}' for k, v in o.items())}" for name, o in OPTIONS.items()
        ]
        raise SystemExit(
            f"dflash_ddp: cannot run {' '.join([what, *pairs])!r}; there are, with their defaults:\n"
            + "\n".join(lines)
            + f"\nworkload is one of {', '.join(workloads)}"
        )
    return options


def main() -> None:
    """Run one benchmark and print its row."""
    what, *pairs = sys.argv[1:] or [""]
    options = read_options(what, pairs)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    repeats = int(options.get("repeats", 1))
    row: dict[str, object] = {"bench": what, **options}
    row |= {"torch": torch.__version__, "transformers": transformers.__version__}
    row["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    if what == "drafter":
        row |= bench_drafter(
            WORKLOADS[options["workload"]],
            device,
            chunk_rows=int(options["chunk_rows"]),
            recompute=Recompute[options["recompute"]],
            repeats=repeats,
        )
    elif what == "target":
        row |= bench_target(WORKLOADS[options["workload"]], device, repeats=repeats)
    elif what == "lane":
        row |= bench_lane(
            [float(gib) for gib in options["gib"].split(",")],
            ctas=options["ctas"].split(","),
            workload=options["workload"],
            repeats=repeats,
        )
    elif what == "stream":
        row |= bench_stream(
            targets=int(options["targets"]),
            drafters=int(options["drafters"]),
            target_ms=float(options["target_ms"]),
            drafter_ms=float(options["drafter_ms"]),
            slow_factor=float(options["slow_factor"]),
            jitter=float(options["jitter"]),
            mib=float(options["mib"]),
            items=int(options["items"]),
        )
    else:
        settings = [pair for pair in pairs if pair.split("=")[0] not in OPTIONS[what]]
        row |= bench_pipeline(
            options["workload"],
            split=options["split"],
            steps=int(options["steps"]),
            parts=options["parts"] == "true",
            options=settings,
        )
    sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
