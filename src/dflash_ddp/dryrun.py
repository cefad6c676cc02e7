"""`dry_run=true`: checks everything that a training run would meet before its first step, and starts nothing.

Each check gives one line; all problems are named, not only the first. No weight is loaded, no process
started, and nothing is left behind in the folders that are tried.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from dflash_ddp import costs
from dflash_ddp.checkpoint import read_state
from dflash_ddp.config import Config, ConfigError, Device
from dflash_ddp.costs import GIB
from dflash_ddp.data.reading import open_sources, raw_rows
from dflash_ddp.data.rendering import HARMLESS
from dflash_ddp.data.tokenising import tokenised_rows
from dflash_ddp.facts import read_facts
from dflash_ddp.preflight import device_type, load_tokenizer, preflight, use_cache_without_hub
from dflash_ddp.startup import Run, check_continues
from dflash_ddp.target.tables import read_spec
from dflash_ddp.texts import TEXT_KEYS, render_settings, source_of

SAMPLE_ROWS = 200


def dry_run(config: Config) -> Iterator[tuple[bool, str]]:
    """(is right, what was found) for each check."""
    use_cache_without_hub()
    checks: list[Callable[[Config], str]] = [_target]
    checks += [partial(_text, name) for name in TEXT_KEYS if source_of(config, name)[0] is not None]
    checks.append(_memory)
    named = set()
    for check in checks:
        try:
            yield True, check(config)
        except (ValueError, OSError) as error:
            if str(error) not in named:  # what several checks meet
                named.add(str(error))
                yield False, str(error)


def where_to_check(config: Config) -> str:
    """What to add to problems that may be this machine's, and not those of the one that will train."""
    if config.device is Device.cpu or torch.cuda.is_available():
        return ""
    return "; there is no GPU here: check a GPU job on a machine with its GPUs, a CPU job with device=cpu"


def _target(config: Config) -> str:
    found = preflight(config)
    text = (
        f"target and tokenizer: capture layers {found.capture_layers}, mask token "
        f"{found.mask_token_id}; write access; "
    )
    if found.checkpoint is None:
        return text + "a new run"
    target, checkpoint = config.target, Path(found.checkpoint)
    spec = read_spec(target.path, target.revision, target.trust_remote_code)
    run = Run(config, device_type(config.device), spec, found, text=None, heldout=None)  # type: ignore[arg-type]
    now = run.settings_fingerprint()
    if config.steps is None:  # epochs of a text that nobody has read yet
        del now["steps"]
    check_continues(checkpoint, read_state(checkpoint).fingerprint | now, config)
    return f"{text}would go on from {checkpoint}, if the text is the same"


def _text(name: str, config: Config) -> str:
    data, tokenizer, (path, split) = config.data, load_tokenizer(config), source_of(config, name)
    assert path is not None
    settings = render_settings(config, tokenizer)
    try:
        sources = open_sources(path, split=split, revision=data.revision, key=TEXT_KEYS[name])
        rows = islice(raw_rows(sources), SAMPLE_ROWS)
        read = list(tokenised_rows(rows, tokenizer, settings=settings, num_workers=0))
    except (ValueError, OSError) as error:
        raise ConfigError(f"data ({name}): {error}") from error
    documents = [document for row in read for document in row.documents]
    bad = [row for row in read if not row.documents]
    malformed = [row for row in bad if not any(r.reason in HARMLESS for r in row.rejected)]
    first = f"; first: {bad[0].place}: {bad[0].rejected[0].reason}" if bad else ""
    counts = f"first {len(read)} rows: {len(documents)} documents, {len(bad)} rows unusable{first}"
    if not documents or len(malformed) > data.max_bad_share * len(read):
        raise ConfigError(f"data ({name}): {path}: {counts}")
    tokens = sum(len(document.ids) for document in documents)
    supervised = sum(int(document.loss_mask.sum()) for document in documents) / tokens
    return f"data ({name}): {counts}; {supervised:.0%} of {tokens:,} tokens are supervised"


def _memory(config: Config) -> str:
    facts = read_facts(config)
    target, drafter = facts.rank_memory("target"), facts.rank_memory("drafter")
    role = "target" if target > drafter else "drafter"
    if config.split.colocated:
        role = "colocated"
    needed = facts.rank_memory(role)
    text = f"target rank {target / GIB:.1f} GiB, drafter rank {drafter / GIB:.1f} GiB in bf16"
    if role == "colocated":
        text = f"a rank with both roles {needed / GIB:.1f} GiB in bf16"
    if device_type(config.device) == "cpu" or not torch.cuda.is_available():
        return f"memory: {text}; no GPU to compare with"
    local, gpus = config.world_size, torch.cuda.device_count()
    available = torch.cuda.mem_get_info(0)[1]
    if needed > available * (1 - costs.RESERVE):
        excess = needed - available * (1 - costs.RESERVE)
        advice = "\n".join(facts.memory_advice(role, excess))
        raise ConfigError(f"memory: {text}, but a GPU has {available / GIB:.0f} GiB:\n{advice}")
    nodes = f"; {local} ranks need {-(-local // gpus)} such nodes" if local > gpus else ""
    return f"memory: {text}, a GPU has {available / GIB:.0f} GiB; {gpus} GPUs here{nodes}"
