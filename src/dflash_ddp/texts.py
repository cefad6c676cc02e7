"""A run's texts under its target's chat template: tokenised or found in the cache, compared, reported."""

import logging
import os
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from dflash_ddp.config import Config, ConfigError
from dflash_ddp.data.rendering import RenderSettings
from dflash_ddp.data.report import format_report
from dflash_ddp.data.store import DocumentStore, documents_in_both, prepare
from dflash_ddp.preflight import load_tokenizer

logger = logging.getLogger(__name__)

MAX_WORKERS = 16
TEXT_KEYS = {"text": "data.path", "heldout": "data.heldout"}


Place = dict[str, str] | None
"""The path of a store and the hash of its content; None: there is no such text."""


def prepare_texts(config: Config, *, speaks: bool) -> dict[str, Place]:
    """Tokenise training and held-out text; where they lie, and what they hold."""
    tokenizer = load_tokenizer(config)
    found: dict[str, Place] = {"text": None, "heldout": None}
    for name in found:
        if source_of(config, name)[0] is None:
            continue
        store = prepare_text(config, tokenizer, name)
        found[name] = {"path": str(store.path), "content": store.content}
        if speaks:
            logger.info("%s", format_report(store.report))
    return found


def source_of(config: Config, name: str) -> tuple[str | None, str]:
    """Path and split of the "text" or the "heldout" text; no path: there is none."""
    data = config.data
    return (data.path, data.split) if name == "text" else (data.heldout, data.heldout_split)


def prepare_text(config: Config, tokenizer: Any, name: str) -> DocumentStore:
    """Tokenise one text under the target's chat template, or find it in the cache.

    Raises:
        ConfigError: it cannot be read or used; `name` says which text.
    """
    data, (path, split) = config.data, source_of(config, name)
    assert path is not None
    workers = data.num_workers
    if workers is None:
        workers = min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    try:
        return prepare(
            path,
            tokenizer,
            settings=render_settings(config, tokenizer),
            cache_dir=data.cache_dir,
            split=split,
            revision=data.revision,
            key=TEXT_KEYS[name],
            num_workers=workers,
            max_bad_share=data.max_bad_share,
        )
    except (ValueError, OSError) as error:
        raise ConfigError(f"data ({name}): {error}") from error


def render_settings(config: Config, tokenizer: Any) -> RenderSettings:
    """How rows become documents."""
    return RenderSettings(
        enable_thinking=config.data.enable_thinking,
        eos_ids=frozenset(eos_ids(config, tokenizer)),
        max_length=config.data.max_length,
    )


def eos_ids(config: Config, tokenizer: Any) -> set[int]:
    """Every token that ends generation: the tokenizer's, and those of generation_config.json."""
    ids = {tokenizer.eos_token_id}
    try:
        generation = GenerationConfig.from_pretrained(
            config.target.path, revision=config.target.revision or "main"
        )
    except OSError:  # many targets have no such file; the tokenizer's token remains
        return ids - {None}
    named = generation.eos_token_id
    ids |= set(named) if isinstance(named, list) else {named}
    return ids - {None}


def check_same_documents(here: dict[str, Place], rank_0: dict[str, Place]) -> None:
    """Every node must have tokenised the same text, to the same tokens.

    Raises:
        ConfigError: it has not.
    """
    for name, ours in here.items():
        theirs = rank_0[name]
        if ours is None or theirs is None:
            continue
        told = (
            f"data ({name}): the documents of this node, {ours['path']}, are not those of rank 0, "
        )
        told += f"{theirs['path']}: "
        if Path(ours["path"]).name != Path(theirs["path"]).name:  # the hash of what decides them
            raise ConfigError(f"{told}files or tokenizers differ between the nodes")
        if ours["content"] != theirs["content"]:
            raise ConfigError(
                f"{told}the chat template gave them other tokens, as one does that prints the date; "
                "delete the older one"
            )


def data_report(
    text: DocumentStore, heldout: DocumentStore | None, *, max_documents: int
) -> dict[str, Any]:
    """The reports of both texts, and what they share: said, since it flatters the accept length."""
    report = {"text": text.report}
    if heldout is None:
        return report
    used = min(max_documents, heldout.num_documents)
    shared = documents_in_both(text, heldout, used)
    if shared:
        ours, theirs = next(iter(shared.items()))
        logger.warning(
            "%d of the %d held-out documents used are in the training text too (first: %s is %s): "
            "accept length is measured on what was trained on",
            len(shared),
            used,
            heldout.origin(ours),
            text.origin(theirs),
        )
    return report | {"heldout": heldout.report | {"num_in_training_text": len(shared)}}
