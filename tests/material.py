"""A small run: a tiny random target, text of words, settings. Batches have 256 tokens and blocks 4."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from targets import build_target

TOKENS_PER_BATCH, STEPS = 256, 6
WORDS = (
    "the river ran past a small house where seven people kept bees and sold honey to anyone who "
    "came by boat in summer while in winter they mended nets and told each other old stories"
).split()
SMALL = (
    "drafter.num_layers=2 drafter.block_size=4 drafter.num_anchors=8 drafter.sliding_layers=0 "
    "drafter.num_attention_heads=null drafter.num_key_value_heads=null drafter.head_dim=null "
    "loss.chunk_rows=16 loss.position_gamma=4 logging=disabled logging.every=1 optim.lr=2e-3 "
    f"tokens_per_batch={TOKENS_PER_BATCH} steps={STEPS} eval.every=3 checkpoint.every=3 device=cpu"
).split()


@dataclass(frozen=True)
class Material:
    """A target, text and a place for runs."""

    folder: Path
    cache: Path

    def overrides(self, name: str, *more: str) -> list[str]:
        """A complete small run called `name`."""
        return [
            *("target=demo", f"target.path={self.folder / 'target'}", "data=demo"),
            *(f"data.path={self.folder / 'train.jsonl'}", f"data.cache_dir={self.cache}"),
            *(f"data.heldout={self.folder / 'heldout.jsonl'}", "data.max_length=256"),
            "data.heldout_generated=false",
            *(f"output_dir={self.output(name)}", *SMALL, *more),
        ]

    def output(self, name: str) -> Path:
        return self.folder / name


def chats(first: int, number: int) -> str:
    """Rows of words, with answers of very unequal length."""
    lines = []
    for row in range(first, first + number):
        generator = np.random.default_rng(row)
        question, answer = (
            " ".join(generator.choice(WORDS, generator.integers(low, high)))
            for low, high in ((3, 8), (1, 25))
        )
        messages = [("user", f"{question}?"), ("assistant", f"{answer}.")]
        turns = [{"role": role, "content": content} for role, content in messages]
        lines.append(json.dumps({"messages": turns}) + "\n")
    return "".join(lines)


def make_material(folder: Path) -> Material:
    """Build the target and write the text."""
    build_target("qwen3_tied", folder / "target")
    (folder / "train.jsonl").write_text(chats(0, 40))
    (folder / "heldout.jsonl").write_text(chats(1000, 5))
    return Material(folder, folder / "cache")
