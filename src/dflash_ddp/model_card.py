"""The README.md of an exported drafter: for which target, from what data, how good, and how to serve it."""

from typing import Any

from dflash_ddp.config import Config
from dflash_ddp.drafter.model import SLIDING, DrafterShape


def _accept_length(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not measured"
    error = row.get("heldout/standard_error")
    spread = f" ± {error:.3f} (standard error)" if error is not None else ""
    where = f"{row['heldout/documents']} held-out documents, step {row['step']}"
    if "heldout/accept_length" in row:
        return (
            f"**{row['heldout/accept_length']:.3f}**{spread} tokens a target call; {where}, greedy"
        )
    walk = row.get("heldout/walk_on_text")
    if walk is None:
        return "not measured"
    return (
        f"not measured. Over text that the target did not write its walk is {walk:.3f}{spread}; "
        f"{where}. No server reaches that figure; `python -m dflash_ddp.evaluate` measures the real one"
    )


def _thinking(enabled: bool | None) -> str:
    if enabled is None:
        return "the template's own default"
    return "on" if enabled else "off"


def _serve(config: Config, shape: DrafterShape, form: str) -> str:
    """How to, with both servers."""
    target, thinking, drafts = config.target, config.data.enable_thinking, shape.block_size - 1
    request = f'{{"enable_thinking": {str(thinking).lower()}}}' if thinking is not None else None
    mixed = 0 < shape.layer_types.count(SLIDING) < len(shape.layer_types)
    runner = "VLLM_USE_V2_MODEL_RUNNER=1 " if mixed else ""
    spec = f'{{"method": "dflash", "model": "<this folder>", "num_speculative_tokens": {drafts}}}'
    sglang = f"""
SGLang, which counts the anchor as well:

```bash
python -m sglang.launch_server --model-path {target.path} --speculative-algorithm DFLASH \\
    --speculative-draft-model-path <this folder> --speculative-num-draft-tokens {shape.block_size}
```
"""
    return f"""## Serve

vLLM:

```bash
{runner}vllm serve {target.path} --speculative-config '{spec}'
```
{sglang if form == "native" else ""}
{f"Send `chat_template_kwargs: {request}` with every request." if request else ""}
"""


def model_card(
    config: Config, shape: DrafterShape, *, step: int, heldout: dict[str, Any] | None, form: str
) -> str:
    """Markdown, with the metadata that hubs read.

    Args:
        config: settings of the run.
        shape: the drafter's.
        step: optimizer steps behind these weights.
        heldout: from `heldout_row`.
        form: native or speculators.
    """
    target, data, drafts = config.target, config.data, shape.block_size - 1
    thinking = data.enable_thinking
    batches = f"{config.batches_per_step} x {config.tokens_per_batch:,} tokens each"
    weights, origin = config.loss.position_weight.value, ""
    if config.drafter.init_from is not None:
        origin = f"; started from {config.drafter.init_from}"
    where = f"split {data.split}, revision {data.revision or 'not pinned'}"
    return f"""---
base_model: {target.path}
pipeline_tag: text-generation
tags: [speculative-decoding, dflash]
---
# DFlash drafter for {target.path}

Proposes {drafts} tokens at once; the target verifies them, so that its output does not change. {form} format.

| | |
|---|---|
| target | {target.path}, revision {target.revision or "not pinned"} |
| accept length | {_accept_length(heldout)} |
| training | {step:,} optimizer steps, {batches}; loss weights: {weights}; seed {config.seed}{origin} |
| data | {data.path}, {where}; documents up to {data.max_length:,} tokens |
| chat template | the target's own, from its tokenizer |
| thinking | {_thinking(thinking)}; serve it so: a drafter is worth little in a mode that it was not trained in |
| block | {shape.block_size}: the anchor and {drafts} mask tokens |
| mask token | row {shape.mask_token_id} of the target's table; neither padding nor an end token |

{_serve(config, shape, form)}"""
