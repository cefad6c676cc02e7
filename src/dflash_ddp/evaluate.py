"""Measure a drafter as a server would use it.

    python -m dflash_ddp.evaluate run=outputs/mine decode=true
    python -m dflash_ddp.evaluate drafter=DIR target=Qwen/Qwen3-8B data=heldout.jsonl generate=true decode=true

The walk needs no decoding, and is an accept length only over answers that the target generated greedily; here the
target itself says which are. `decode=true` decodes these documents for real: the output must be the target's own, and
accept length the walk's. The last line is one JSON object; the exit code is 1 if the output was not the target's own.

A tie: where the target's two best logits are closer than TIE_MARGIN, reading a block at once may round to another
argmax than reading token by token. An answer that first differs there counts as `near_ties`, not as a loss.
"""

import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from dflash_ddp.accept import AcceptTally, answer_spans
from dflash_ddp.batch import PackedBatch
from dflash_ddp.config import Config, ConfigError, Device, Dtype, Recompute
from dflash_ddp.data.packing import packed_batch
from dflash_ddp.decode import Decoded, DrafterReader, Sampler, TargetReader, decode
from dflash_ddp.drafter.heldout import walk_batch
from dflash_ddp.drafter.step import LossSettings, Tables
from dflash_ddp.log import USER_ERROR, setup_logging, tell
from dflash_ddp.native import load_capture_layers, load_native, newest_drafter
from dflash_ddp.preflight import device_type, load_tokenizer, torch_dtype, use_cache_without_hub
from dflash_ddp.reference import Reference
from dflash_ddp.settings import Rule, broken_rules, command_line, saved_settings
from dflash_ddp.texts import eos_ids, prepare_text

logger = logging.getLogger("dflash_ddp.evaluate")  # also where this file is the program

TIE_MARGIN = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Logits; of the target's dtype."""
ANCHORS, CHUNK_ROWS = 64, 1024  # of one drafter forward of the walk


@dataclass(kw_only=True, slots=True)
class EvaluateConfig:
    """What to measure. Give `run`, or `drafter`, `target` and `data`; what is given goes first."""

    run: str | None = None
    """Directory of a run: its export (or newest checkpoint), target, held-out text and rendering."""
    drafter: str | None = None
    """Native folder."""
    target: str | None = None
    """Folder in transformers format, or a name on the hub."""
    data: str | None = None
    """Chat text, as `data.heldout` of a training run."""
    enable_thinking: bool | None = None
    """Passed to the chat template; null: as the run has it, else the template's own default."""
    documents: int | None = None
    """Documents measured, the first ones; >= 1; null: as the run's evaluations, else 32."""
    generate: bool = False
    """The target answers the prompts anew; the text's answers are not used."""
    max_new_tokens: int = 512
    """Of a generated answer; >= 1."""
    decode: bool = False
    """Decode for real, with the drafter and without."""
    temperature: float = 0.0
    """Of `decode`; >= 0."""
    reference: bool = False
    """With `decode`: also by z-lab's `dflash_generate` (package dflash), token for token."""
    device: Device = Device.auto
    """auto | cuda | cpu."""
    dtype: Dtype = Dtype.auto
    """Of target and drafter."""


class Pair(NamedTuple):
    """Target and drafter, ready to read, and where the drafter came from."""

    target: TargetReader
    drafter: DrafterReader
    stop_ids: set[int]
    folder: Path


def run_config(options: EvaluateConfig) -> tuple[Config, Path]:
    """The settings of the training run, or of none, with what the options say; and the drafter.

    Raises:
        ConfigError: neither a run nor all three of drafter, target and data; a value out of bounds.
    """
    rules: list[Rule] = [(["documents", "max_new_tokens"], lambda v: v >= 1, "must be >= 1")]
    rules.append((["temperature"], lambda v: v >= 0, "must be >= 0"))
    for problem in broken_rules(options, rules):
        raise ConfigError(problem)
    if options.run is not None:
        config = saved_settings(Path(options.run))
    elif options.drafter and options.target and options.data:
        config = Config()
        config.data.path = options.data
    else:
        raise ConfigError("give run=<dir>, or drafter=<dir> target=<dir> data=<file>")
    if options.target is not None:
        config.target.path, config.target.revision = options.target, None
    config.data.heldout = options.data or config.data.heldout
    if options.enable_thinking is not None:
        config.data.enable_thinking = options.enable_thinking
    if config.data.heldout is None:
        raise ConfigError(f"run={options.run} has no held-out text; give data=<file>")
    folder = Path(options.drafter) if options.drafter else newest_drafter(Path(options.run or ""))
    return config, folder


def load_pair(config: Config, folder: Path, *, device: str, dtype: torch.dtype) -> Pair:
    """Load both; the drafter uses the target's own tables.

    Raises:
        ConfigError: the drafter is another target's.
    """
    model = AutoModelForCausalLM.from_pretrained(
        config.target.path,
        revision=config.target.revision,
        trust_remote_code=config.target.trust_remote_code,
        dtype=dtype,
        device_map={"": device},
    ).eval()
    tables = Tables(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    drafter = load_native(folder, torch.device(device)).to(dtype)
    if drafter.shape.hidden_size != tables.embedding_VH.shape[1]:
        raise ConfigError(
            f"{folder} was trained for another target: its hidden size is "
            f"{drafter.shape.hidden_size}, that of {config.target.path} "
            f"{tables.embedding_VH.shape[1]}"
        )
    target = TargetReader(model, load_capture_layers(folder))
    stop_ids = eos_ids(config, load_tokenizer(config))
    return Pair(target, DrafterReader(drafter, tables), stop_ids, folder)


def answered(pair: Pair, batch: PackedBatch, max_new_tokens: int) -> tuple[PackedBatch, Decoded]:
    """The document with its last answer replaced by the target's own."""
    first = answer_spans(batch)[-1].first
    prompt = batch.input_ids[:first].tolist()
    plain = decode(pair.target, None, prompt, max_new_tokens=max_new_tokens, stop_ids=pair.stop_ids)
    ids = np.array(prompt + plain.tokens, dtype=np.int32)
    places = np.arange(len(ids), dtype=np.int32)
    lengths = np.array([len(ids)], dtype=np.int32)
    return PackedBatch(
        batch.index, ids, places, places >= first, lengths, batch.document_ids
    ), plain


def walked(pair: Pair, batch: PackedBatch) -> tuple[list[int], bool]:
    """Tokens of the target calls, and whether the target itself would have written the answers."""
    pair.target.start()
    reading = pair.target.read(batch.input_ids.tolist())
    calls = walk_batch(
        pair.drafter.model,
        pair.drafter.tables,
        reading.features_LC.to(pair.drafter.tables.embedding_VH.dtype),
        batch,
        num_anchors=ANCHORS,
        loss=LossSettings(CHUNK_ROWS, Recompute.none),
        flex=False,
    )[0]
    logits_LV = reading.logits_LV[:-1]
    next_ids = torch.from_numpy(batch.input_ids[1:].astype(np.int64)).to(logits_LV.device)
    label_logits_L = logits_LV.gather(-1, next_ids[:, None])[:, 0]
    short_L = (logits_LV.amax(-1).float() - label_logits_L.float()).cpu().numpy()
    margin = TIE_MARGIN[logits_LV.dtype]
    return calls, bool((short_L[batch.loss_mask[1:]] <= margin).all())


def is_tie(pair: Pair, prompt: list[int], plain: list[int], other: list[int]) -> bool:
    """Whether two answers first differ where the target finds both tokens equally good."""
    pairs = zip(plain, other, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:
        return False  # one is the start of the other
    pair.target.start()
    logits_1V, _ = pair.target.read(prompt + plain[:place], num_logits=1)
    gap = logits_1V[0, plain[place]].float() - logits_1V[0, other[place]].float()
    return abs(float(gap)) <= TIE_MARGIN[logits_1V.dtype]


class Total:
    """Sums over the documents that were decoded."""

    def __init__(self, block_size: int) -> None:
        """Nothing yet."""
        self.tally, self.reference = AcceptTally.empty(block_size), AcceptTally.empty(block_size)
        self.tokens = self.calls = self.different = self.near_ties = self.differing_walks = 0
        self.seconds = self.plain_seconds = 0.0
        self.plain_tokens = 0

    def add(self, fast: Decoded, plain: Decoded) -> None:
        """One answer, decoded with the drafter and without."""
        self.tokens += len(fast.tokens) - 1
        self.calls += len(fast.calls)
        self.seconds += fast.seconds
        self.plain_tokens += len(plain.tokens) - 1
        self.plain_seconds += plain.seconds

    def row(self, *, greedy: bool) -> dict[str, Any]:
        """What the JSON line says of decoding."""
        speedup = None
        if self.tokens and self.plain_tokens and self.seconds:
            speedup = (self.plain_seconds / self.plain_tokens) / (self.seconds / self.tokens)
        return {
            "accept_length_decode": self.tally.accept_length,
            "lossless": self.different == 0 if greedy and self.calls else None,
            "near_ties": self.near_ties,
            "walks_that_differ": self.differing_walks,
            "tokens_per_target_call": self.tokens / self.calls if self.calls else None,
            "speedup": speedup,
        }


def decode_document(
    pair: Pair, batch: PackedBatch, known: Decoded | None, total: Total, sampler: Sampler
) -> list[int]:
    """Decode every answer of a document for real; the tokens of the target calls."""
    calls: list[int] = []
    for span in answer_spans(batch):
        prompt, limit = batch.input_ids[: span.first].tolist(), span.end - span.first
        plain = known or decode(
            pair.target, None, prompt, max_new_tokens=limit, stop_ids=pair.stop_ids
        )
        fast = decode(
            pair.target,
            pair.drafter,
            prompt,
            max_new_tokens=limit,
            stop_ids=pair.stop_ids,
            sampler=sampler,
        )
        total.add(fast, plain)
        calls += fast.calls
        if sampler.temperature == 0 and fast.tokens != plain.tokens:
            tie = is_tie(pair, prompt, plain.tokens, fast.tokens)
            total.near_ties, total.different = total.near_ties + tie, total.different + (not tie)
    total.tally.add(calls)
    return calls


def evaluate(options: EvaluateConfig) -> dict[str, Any]:
    """Measure; the JSON line as a dictionary.

    Raises:
        ConfigError: see `run_config`, `load_pair` and `prepare_text`.
    """
    use_cache_without_hub()
    config, folder = run_config(options)
    device = device_type(options.device)
    dtype = torch_dtype(options.dtype, device)
    pair = load_pair(config, folder, device=device, dtype=dtype)
    data = config.data
    store = prepare_text(config, load_tokenizer(config), "heldout")
    size = pair.drafter.model.shape.block_size
    own, text, total = AcceptTally.empty(size), AcceptTally.empty(size), Total(size)
    sampler = Sampler(options.temperature, torch.Generator(device).manual_seed(config.seed))
    reference = Reference(folder, pair.target.model) if options.reference else None
    number = options.documents or (config.eval.max_documents if options.run else 32)
    for document in range(min(number, store.num_documents)):
        batch, known = packed_batch(store, np.array([document]), document), None
        if options.generate:
            batch, known = answered(pair, batch, options.max_new_tokens)
        calls, generated = walked(pair, batch)
        (own if generated else text).add(calls)
        if options.decode and generated:
            decoded = decode_document(pair, batch, known, total, sampler)
            total.differing_walks += decoded != calls
            if reference is not None:
                total.reference.add(reference.calls(batch, pair.stop_ids))
        tokens = f"{sum(calls) / max(1, len(calls)):.2f} tokens each"
        logger.info("document %d: %d target calls, %s", document, len(calls), tokens)
    if text.documents and data.heldout_generated:
        logger.warning(
            "data.heldout_generated=true, but %d of %d answers are not the target's own",
            *(text.documents, own.documents + text.documents),
        )
    if options.decode and not own.documents:
        logger.warning(
            "no answer is the target's own, so nothing was decoded: generate=true lets it answer"
        )
    return {
        "accept_length_walk": own.accept_length,
        **total.row(greedy=options.temperature == 0),
        **({"accept_length_reference": total.reference.accept_length} if reference else {}),
        "documents": own.documents,
        "standard_error": own.standard_error,
        "slot_acceptance": own.slot_acceptance(),
        "walk_on_text": text.accept_length,
        "documents_on_text": text.documents,
        "drafter": str(folder),
    }


def main() -> None:
    """Parse the command line, measure, print."""
    setup_logging(rank=0, role="evaluate", verbose=True)
    try:
        row = evaluate(command_line(EvaluateConfig, sys.argv[1:]))
    except (ConfigError, OSError) as error:
        tell(error)
        raise SystemExit(USER_ERROR) from None
    sys.stdout.write(json.dumps(row) + "\n")
    raise SystemExit(row["lossless"] is False)


if __name__ == "__main__":
    main()
