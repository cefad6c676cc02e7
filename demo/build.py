"""Builds the demo: a small trained target, and chat rows with that target's own answers.

Makes, under --out (default: this folder), from the source of Python's standard library alone:

    target/        Qwen3ForCausalLM, bfloat16, with tokenizer, chat template, generation settings
    train.jsonl    chat rows; every answer is the target's greedy output
    heldout.jsonl  the same, with prompts from files that neither the target nor train.jsonl saw
    build.json     what was measured: losses, counts, seconds of each stage

Stages: collect text -> tokenizer -> train target -> generate rows and verify -> measure.

    python demo/build.py                       # the real one, under an hour on two cores
    python demo/build.py --quick --out DIR     # the same in about a minute, of no use but to test
    python demo/build.py --keep-target         # new rows from the target that is there

Invariant: everything follows from --seed, --steps and the interpreter's library, as long as
--minutes does not end the training first.
"""

import argparse
import json
import logging
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from byte_bpe import TABLE_ROWS, end_ids, train_tokenizer
from greedy_rows import build_rows, load_target
from measure import measure
from stdlib_text import Definition, SourceFile, collect_files, definitions
from target_training import new_target, target_config, train_target
from training_text import epochs
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM

log = logging.getLogger("demo.build")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Command line of the build."""
    parser = argparse.ArgumentParser(description="Build demo target and rows.")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--steps", type=int, default=1800, help="training steps at most")
    parser.add_argument("--minutes", type=float, default=40.0, help="training minutes at most")
    parser.add_argument("--train-rows", type=int, default=2000)
    parser.add_argument("--heldout-rows", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a tiny build, to test this file")
    parser.add_argument("--keep-target", action="store_true", help="use the target under --out")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.minutes = min(options.steps, 40), min(options.minutes, 0.5)
        options.train_rows, options.heldout_rows = 24, 6
    return options


@contextmanager
def stage(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Log a stage and note how long it took."""
    log.info("stage: %s", name)
    start = time.monotonic()
    yield
    seconds[name] = round(time.monotonic() - start, 1)
    log.info("stage: %s took %.1f s", name, seconds[name])


def make_target(
    files: list[SourceFile], found: list[Definition], folder: Path, *, options: argparse.Namespace
) -> int:
    """Train tokenizer and target and save both; returns the number of tokens trained on."""
    tokenizer = train_tokenizer([file.text for file in files if not file.heldout])
    eos_ids = end_ids(tokenizer)
    config = target_config(table_rows=TABLE_ROWS, eos_ids=eos_ids, pad_id=eos_ids[1])
    model = new_target(config, seed=options.seed)
    checkpoint = options.out / "target.checkpoint.pt"
    seen = train_target(
        model,
        epochs(files, found, tokenizer, seed=options.seed),
        num_steps=options.steps,
        minutes=options.minutes,
        seed=options.seed,
        checkpoint=checkpoint,
    )
    save_target(model, tokenizer, folder)
    checkpoint.unlink(missing_ok=True)
    return seen


def save_target(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the target as transformers reads it; greedy by default, two end tokens."""
    eos_ids = end_ids(tokenizer)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=eos_ids, pad_token_id=eos_ids[1]
    )
    shutil.rmtree(folder, ignore_errors=True)
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(arguments: list[str]) -> None:
    """Run the stages in order."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    folder = options.out / "target"
    report_path = options.out / "build.json"
    old = json.loads(report_path.read_text()) if options.keep_target else {}
    seconds: dict[str, float] = old.get("seconds", {})
    tokens = old.get("training_tokens", 0)
    with stage("collect", seconds):
        files = collect_files(max_files=150 if options.quick else None)
        found = [definition for file in files for definition in definitions(file)]
        log.info("%d definitions", len(found))
    if not options.keep_target:
        with stage("train", seconds):
            tokens = make_target(files, found, folder, options=options)
    model, tokenizer = load_target(folder)
    counts: dict[str, dict[str, float]] = {}
    taken: set[str] = set()
    with stage("generate", seconds):
        for name, heldout, wanted in (
            ("heldout", True, options.heldout_rows),
            ("train", False, options.train_rows),
        ):
            counts[name] = build_rows(
                model,
                tokenizer,
                [definition for definition in found if definition.heldout == heldout],
                options.out / f"{name}.jsonl",
                wanted=wanted,
                seed=options.seed,
                taken=taken,
                lenient=options.quick,
            )
    with stage("measure", seconds):
        losses = measure(
            model,
            tokenizer,
            files,
            found,
            rows=options.out / "heldout.jsonl",
            num_documents=20 if options.quick else 300,
        )
    report = {
        "training_tokens": tokens, "seconds": seconds, "rows": counts, "losses": losses,
        "parameters": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip
    report_path.write_text(json.dumps(report, indent=1) + "\n")
    log.info("done: %s", json.dumps(report))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    main(sys.argv[1:])
