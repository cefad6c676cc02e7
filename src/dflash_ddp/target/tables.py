"""What a run needs to know of a target without running it: sizes, ids and its two tables.

In: a folder or hub id in transformers format. Out: a `TargetSpec` from config.json alone, the
embedding and head tables `[V, H]` from the safetensors files alone, and the two choices that follow
from a spec: capture layers and mask token. Drafter ranks never load more of a target than this.

Invariants: sizes come from the text config, which multimodal checkpoints nest; widths come from the
tables, never from the tokenizer; a tied target gives one tensor under both names.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

QWEN3_5_TABLE_ROWS = 248320
QWEN3_5_MASK_TOKEN = 248070  # <|audio_start|>: a special token that text never contains


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """Sizes and ids of a target.

    Attributes:
        model_type: of the top level of config.json, such as "qwen3_5".
        num_layers: decoder layers of the whole target.
        table_rows: V, rows of the embedding and head tables (padded past the tokenizer).
        rope_theta: rotary base of the full-attention layers.
        tied: True if the head is the embedding table.
        eos_token_ids: every end token that config.json names, in its order.
    """

    model_type: str
    hidden_size: int
    num_layers: int
    table_rows: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    initializer_range: float
    tied: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None

    @property
    def eos_token_id(self) -> int | list[int] | None:
        """The end tokens as config.json writes them: one id, a list, or None."""
        ids = list(self.eos_token_ids)
        return ids if len(ids) > 1 else next(iter(ids), None)


def read_config(path: str, revision: str | None, trust_remote_code: bool) -> PretrainedConfig:
    """config.json as transformers parses it; ValueError if there is none that can be used."""
    try:
        config = AutoConfig.from_pretrained(
            path, revision=revision, trust_remote_code=trust_remote_code
        )
    except OSError as error:
        raise ValueError(
            f"target.path={path!r}, revision {revision!r}: no config.json could be read. Give a "
            "local folder in transformers format, or a hub id that is reachable or in the cache."
        ) from error
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"target.path={path!r} is quantised: give the bf16 checkpoint instead.")
    return config


def read_spec(path: str, revision: str | None, trust_remote_code: bool = False) -> TargetSpec:
    """Read a `TargetSpec`; no weight is touched.

    Raises:
        ValueError: there is no config.json, or it lacks a size that the drafter needs.
    """
    config = read_config(path, revision, trust_remote_code)
    text = config.get_text_config(decoder=True)

    def need(key: str) -> int:
        if getattr(text, key, None) is None:
            raise ValueError(
                f"target.path={path!r}: the text config ({text.model_type}) has no {key!r}. "
                "Targets are decoder-only language models with rotary attention."
            )
        return getattr(text, key)

    def ids(key: str) -> list[int]:
        found = [getattr(level, key, None) for level in (text, config)]
        lists = [value if isinstance(value, list) else [value] for value in found]
        return [i for value in lists for i in value if i is not None]

    num_heads = need("num_attention_heads")
    return TargetSpec(
        model_type=config.model_type,
        hidden_size=need("hidden_size"),
        num_layers=need("num_hidden_layers"),
        table_rows=need("vocab_size"),
        intermediate_size=need("intermediate_size"),
        num_attention_heads=num_heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(text, "head_dim", None) or need("hidden_size") // num_heads,
        rope_theta=_nested_rope_theta(text) or float(need("rope_theta")),
        rms_norm_eps=need("rms_norm_eps"),
        max_position_embeddings=need("max_position_embeddings"),
        initializer_range=getattr(text, "initializer_range", 0.02),
        tied=_tied(PretrainedConfig.get_config_dict(path, revision=revision)[0], text),
        eos_token_ids=tuple(dict.fromkeys(ids("eos_token_id"))),
        bos_token_id=next(iter(ids("bos_token_id")), None),
        pad_token_id=next(iter(ids("pad_token_id")), None),
    )


def _nested_rope_theta(text: PretrainedConfig) -> float | None:
    """The base inside `rope_parameters`, which may hold one entry for each layer type."""
    nested = getattr(text, "rope_parameters", None) or {}
    base = nested.get("full_attention", nested).get("rope_theta")
    return None if base is None else float(base)


def _tied(raw: dict, text: PretrainedConfig) -> bool:
    """True if either level of the raw file ties the tables; the class decides if both are silent.

    The raw file, because a wrapper class fills in a default of its own for a flag never written.
    """
    levels = [raw, *(level for level in raw.values() if isinstance(level, dict))]
    flags = [
        level.get("tie_word_embeddings")
        for level in levels
        if level is raw or level.get("model_type") == text.model_type
    ]
    if set(flags) == {None}:
        return bool(getattr(text, "tie_word_embeddings", False))
    return any(flags)


def default_capture_layers(num_layers: int, num_drafter_layers: int) -> list[int]:
    """Decoder layers that the drafter reads, spread evenly from layer 1 to `num_layers - 3`.

    Raises:
        ValueError: the target is too shallow: ids would repeat or fall outside it.
    """
    if num_drafter_layers == 1:
        layers = [num_layers // 2]
    else:
        step = (num_layers - 4) / (num_drafter_layers - 1)
        layers = [round(1 + i * step) for i in range(num_drafter_layers)]
    if layers != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < num_layers:
        raise ValueError(
            f"target.capture_layers: the default for {num_drafter_layers} drafter layers on a "
            f"target of {num_layers} layers would be {layers}: a layer repeats or is not there. "
            f"Set target.capture_layers to distinct ids in 0..{num_layers - 1}."
        )
    return layers


def choose_capture_layers(
    chosen: list[int] | None, num_layers: int, num_drafter_layers: int
) -> list[int]:
    """The decoder layers that are read, ascending: the chosen ones, else the default.

    Raises:
        ValueError: the target has no such layer; see `default_capture_layers`.
    """
    if chosen is None:
        return default_capture_layers(num_layers, num_drafter_layers)
    if chosen[-1] >= num_layers:
        raise ValueError(
            f"target.capture_layers={chosen}: the target has layers 0..{num_layers - 1} (0 is the "
            "first decoder layer; the embedding cannot be captured)."
        )
    return chosen


def read_tables(
    path: str,
    revision: str | None,
    spec: TargetSpec,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[Tensor, Tensor]:
    """Read `(embedding_VH, head_VH)`; a tied target gives the same tensor twice.

    Of a hub target only the shards that hold the tables are fetched.

    Raises:
        ValueError: no safetensors, a table missing or ambiguous, or its shape is not `[V, H]`.
    """
    file_of = _tensor_files(path, revision)
    names = [_find_table(file_of, "embed_tokens.weight", path)]
    if not spec.tied:
        names.append(_find_table(file_of, "lm_head.weight", path))
    tables = []
    for name in names:
        file = _fetch(path, revision, file_of[name])
        if file is None:
            raise ValueError(
                f"target.path={path!r}: {file_of[name]}, which holds {name}, is missing. Complete "
                "the download."
            )
        with safe_open(file, framework="pt", device=str(device)) as handle:
            table_VH = handle.get_tensor(name).to(dtype).contiguous()
        if tuple(table_VH.shape) != (spec.table_rows, spec.hidden_size):
            raise ValueError(
                f"target.path={path!r}: {name} is {list(table_VH.shape)}, but config.json says "
                f"[vocab_size, hidden_size] = {[spec.table_rows, spec.hidden_size]}. The files do "
                "not belong together."
            )
        tables.append(table_VH)
    return tables[0], tables[-1]


def random_tables(
    spec: TargetSpec, dtype: torch.dtype, device: torch.device | str, seed: int
) -> tuple[Tensor, Tensor]:
    """Tables `(embedding_VH, head_VH)` of a target with random weights, equal on every rank."""
    tables = []
    for index in range(1 if spec.tied else 2):
        generator = torch.Generator(device).manual_seed(seed + index)
        table_VH = torch.empty(spec.table_rows, spec.hidden_size, dtype=dtype, device=device)
        tables.append(table_VH.normal_(0.0, spec.initializer_range, generator=generator))
    return tables[0], tables[-1]


def check_files(path: str, revision: str | None, spec: TargetSpec) -> None:
    """Look for a target's tables and, in a local folder, its files, without reading a weight.

    Of a hub target the index is fetched; one that has none is a single file, and fetched whole.

    Raises:
        ValueError: there are no safetensors, no table in them, or a file is missing.
    """
    file_of = _tensor_files(path, revision)
    for table in ("embed_tokens.weight", *(() if spec.tied else ("lm_head.weight",))):
        _find_table(file_of, table, path)
    local = Path(path)
    missing = [f for f in sorted(set(file_of.values())) if not (local / f).is_file()]
    if local.is_dir() and missing:
        raise ValueError(f"target.path={path!r}: {missing} are missing. Complete the download.")


def _tensor_files(path: str, revision: str | None) -> dict[str, str]:
    """Tensor name -> safetensors file that holds it, for a sharded or a single-file target."""
    index = _fetch(path, revision, "model.safetensors.index.json")
    if index is not None:
        return json.loads(index.read_text())["weight_map"]
    single = _fetch(path, revision, "model.safetensors")
    if single is not None:
        with safe_open(single, framework="pt") as handle:
            return dict.fromkeys(handle.keys(), single.name)
    raise ValueError(
        f"target.path={path!r}: found neither model.safetensors nor model.safetensors.index.json. "
        "Load other formats with transformers and save_pretrained() them."
    )


def _fetch(path: str, revision: str | None, name: str) -> Path | None:
    """A file of a local folder or of the hub; None if it does not exist there."""
    if Path(path).is_dir():
        local = Path(path) / name
        return local if local.is_file() else None
    try:
        return Path(hf_hub_download(path, name, revision=revision))
    except EntryNotFoundError:
        return None


def _find_table(file_of: dict[str, str], suffix: str, path: str) -> str:
    """The one tensor that ends in `suffix`; a multi-token-prediction head's own does not count."""
    names = [n for n in sorted(file_of) if f".{n}".endswith(f".{suffix}") and n[:4] != "mtp."]
    if len(names) != 1:
        raise ValueError(
            f"target.path={path!r}: needs one tensor named *{suffix}, found {names}. An untied "
            "target must store its head; if its head is the embedding, config.json must say "
            "tie_word_embeddings: true."
        )
    return names[0]


def choose_mask_token(
    spec: TargetSpec, tokenizer: PreTrainedTokenizerBase, explicit: int | None
) -> int:
    """The id that fills the open slots of a block: it has a table row and never occurs in text.

    Order: `explicit`; 248070 for the Qwen3.5 table; for Qwen3 the first row past the tokenizer;
    the tokenizer's own mask token. Serving must use the same id, so exports carry it.

    Raises:
        ValueError: the id has no table row, is a pad, end or start token, or no rule applies.
    """
    vocabulary = set(tokenizer.get_vocab().values())
    first_free = max(vocabulary) + 1
    if explicit is not None:
        mask_id, origin = explicit, "set explicitly"
    elif spec.model_type.startswith("qwen3_5") and spec.table_rows == QWEN3_5_TABLE_ROWS:
        mask_id, origin = QWEN3_5_MASK_TOKEN, "the Qwen3.5 default"
    elif spec.model_type.startswith("qwen3") and first_free < spec.table_rows:
        mask_id, origin = first_free, "the first table row past the tokenizer"
    elif tokenizer.mask_token_id is not None:
        mask_id, origin = tokenizer.mask_token_id, "the tokenizer's mask token"
    else:
        raise ValueError(
            f"drafter.mask_token_id: there is no default for model_type {spec.model_type!r} and "
            f"the tokenizer has no mask token. Set an id in 0..{spec.table_rows - 1} that "
            "never occurs in text."
        )
    named = [spec.pad_token_id, spec.bos_token_id, *spec.eos_token_ids]
    named += [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id]
    taken = {i for i in named if i is not None}
    if not 0 <= mask_id < spec.table_rows or mask_id in taken:
        raise ValueError(
            f"drafter.mask_token_id={mask_id} ({origin}): must be in 0..{spec.table_rows - 1} and "
            f"none of the pad, start and end tokens {sorted(taken)}."
        )
    if mask_id in vocabulary - set(tokenizer.get_added_vocab().values()):
        logger.warning("mask token %d (%s) is an ordinary token: text may hold it", mask_id, origin)
    return mask_id
