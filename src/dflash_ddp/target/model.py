"""The frozen target: a decoder that ends where the drafter stops reading.

In: a folder or hub id in transformers format. Out: its base model on the device, without head and
final norm, holding only the decoder layers up to the last captured one: what it returns is the raw
output of that layer. Layers above are never read from disk.

Invariants: nothing is trained, cached or freshly initialised; rows are causal with padding on the
right, so no attention mask is ever needed.
"""

import importlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from dflash_ddp.target.tables import check_capture_layers, read_config

logger = logging.getLogger(__name__)

# Not "flash" anything: transformers takes such a name for a kernel to look up.
CAUSAL_ROWS = "causal_rows"


def causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention of whole rows; no mask.

    Query is `[R, A, L, D]`, key and value are `[R, G, L, D]`, out is `[R, L, A, D]`.

    Before it builds a mask, transformers asks the GPU whether the rows are packed: a wait in every
    forward. For an attention function that it does not know it builds none and asks nothing. It
    passes more keywords than we read, hence `**_`.
    """
    if attention_mask is not None:
        raise ValueError("context features are captured without an attention mask")
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(CAUSAL_ROWS, causal_attention)


def load_target(
    path: str,
    revision: str | None,
    *,
    capture_layers: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    attention: str = "sdpa",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a frozen target straight onto `device`.

    Args:
        path: folder or hub id.
        revision: hub revision, or None.
        capture_layers: decoder layers that will be read; the highest is the last one loaded.
        dtype: of the weights and so of the features.
        device: where the weights go; they are never in host memory as a whole.
        attention: "sdpa" (PyTorch's fused causal attention), or another name of transformers.
        trust_remote_code: run model code that comes with the checkpoint.

    Raises:
        ValueError: bad capture layers, a quantised or incomplete checkpoint, an unknown layout.
    """
    config = read_config(path, revision, trust_remote_code)
    text = config.get_text_config(decoder=True)
    check_capture_layers(capture_layers, text.num_hidden_layers)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"target.path={path!r} is quantised: give the bf16 checkpoint instead.")
    _keep_layers(text, max(capture_layers) + 1)
    with _quiet_loading():
        model, report = AutoModel.from_pretrained(
            path,
            config=text,
            revision=revision,
            dtype=dtype,
            device_map={"": device},
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"target.path={path!r}: the files lack {len(missing)} tensors, which would be random: "
            f"{', '.join(missing[:5])}. Complete the download, or name the right checkpoint."
        )
    freeze_target(model, capture_layers=capture_layers)
    logger.info("target %s: %d layers, %s, on %s", path, len(model.layers), dtype, device)
    return model


def freeze_target(model: PreTrainedModel, *, capture_layers: Sequence[int]) -> None:
    """Turn a base model into a target, in place: frozen, cut after the last captured layer.

    Raises:
        ValueError: bad capture layers, or no decoder layers in `.layers` before a final `.norm`.
    """
    layers = decoder_layers(model)
    check_capture_layers(capture_layers, len(layers))
    del layers[max(capture_layers) + 1 :]
    _keep_layers(model.config, len(layers))
    model.norm = nn.Identity()
    model.config.use_cache = False
    model.eval().requires_grad_(False)
    types = set(getattr(model.config, "layer_types", None) or ())
    windowed = getattr(model.config, "sliding_window", None) is not None
    if model.config._attn_implementation == "sdpa":
        if windowed or not types <= {"full_attention", "linear_attention"}:
            logger.info("windowed layers: transformers builds their masks, one wait per forward")
        else:
            model.set_attn_implementation(CAUSAL_ROWS)
    if "linear_attention" in types:
        logger.info("linear attention: %s", "; ".join(describe_kernels()))


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a base model; ValueError if they are not where they are expected."""
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not hasattr(model, "norm"):
        raise ValueError(
            f"{type(model).__name__} does not keep decoder layers in .layers before a final .norm; "
            "targets of this kind are not supported."
        )
    return layers


def describe_kernels() -> list[str]:
    """One phrase for each kernel of linear attention: what transformers runs, what to install."""
    phrases = []
    for what, module, package, otherwise in (
        ("delta rule", "fla.ops.gated_delta_rule", "flash-linear-attention", "slow"),
        ("convolution", "causal_conv1d", "causal-conv1d", "slow unless layers are compiled"),
    ):
        try:
            importlib.import_module(module)
            phrases.append(f"{what} by {package}")
        except (ImportError, OSError, RuntimeError) as error:
            phrases.append(f"{what} in PyTorch, {otherwise} (install {package}: {error})")
    return phrases


@contextmanager
def transformers_forward(model: PreTrainedModel) -> Iterator[None]:
    """Within: transformers' own attention and uncompiled layers; our changes return afterwards.

    The cut and the missing final norm stay, so the last of `hidden_states` is raw like the others.
    """
    compiled = {layer: layer.__dict__.pop("forward", None) for layer in decoder_layers(model)}
    attention = model.config._attn_implementation
    model.set_attn_implementation("sdpa" if attention == CAUSAL_ROWS else attention)
    try:
        yield
    finally:
        model.set_attn_implementation(attention)
        for layer, forward in compiled.items():
            if forward is not None:
                layer.forward = forward


def _keep_layers(text: PretrainedConfig, num_layers: int) -> None:
    """Shorten a text config, in place, to its first decoder layers."""
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:num_layers]


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Without transformers' table of unread tensors (we skip them on purpose) and progress bar."""
    library_logger = logging.getLogger("transformers")
    level, bar = library_logger.level, transformers_logging.is_progress_bar_enabled()
    library_logger.setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        library_logger.setLevel(level)
        if bar:
            transformers_logging.enable_progress_bar()
