"""z-lab's own decoding loop (package dflash) on the same target and drafter: what ours must agree with."""

import importlib
import time
from collections.abc import Collection
from pathlib import Path

import torch
from transformers import PreTrainedModel

from dflash_ddp.accept import answer_spans
from dflash_ddp.batch import PackedBatch
from dflash_ddp.config import ConfigError


class Reference:
    """z-lab's class, loaded from a native folder."""

    def __init__(self, folder: Path, target: PreTrainedModel) -> None:
        """Load it beside the target.

        Raises:
            ConfigError: the package is not installed, or its class does not take the folder whole.
        """
        try:
            self._module = importlib.import_module("dflash.model")
        except ImportError:
            raise ConfigError(
                "reference=true needs z-lab's package: pip install --no-deps dflash==0.1.0"
            ) from None
        if not torch.cuda.is_available():  # its clock waits for a GPU
            self._module._cuda_time = time.perf_counter  # type: ignore[attr-defined]
        self._target = target
        drafter, report = self._module.DFlashDraftModel.from_pretrained(
            folder, dtype=target.dtype, output_loading_info=True
        )
        if bad := {kind: names for kind, names in report.items() if names}:
            raise ConfigError(f"{folder}: z-lab's class does not load it whole: {bad}")
        self._drafter = drafter.to(target.device).eval()

    def calls(self, batch: PackedBatch, stop_ids: Collection[int]) -> list[int]:
        """Decode every answer of one document; the tokens that each target call yielded.

        Its loop shortens the last block to the limit, which asks the drafter something else than a
        whole block would; so the limit is put out of the way, and the last call cut afterwards.

        Raises:
            ValueError: the tokens are not the document's.
        """
        calls: list[int] = []
        for span in answer_spans(batch):
            answer = batch.input_ids[span.first : span.end].tolist()
            prompt = torch.tensor(batch.input_ids[None, : span.first], dtype=torch.int64)
            result = self._module.dflash_generate(
                self._drafter,
                self._target,
                prompt.to(self._target.device),
                max_new_tokens=len(answer) + self._drafter.block_size,
                stop_token_ids=sorted(stop_ids),
                return_stats=True,
            )
            tokens = result.output_ids[0, span.first :].tolist()
            if tokens[: len(answer)] != answer:
                raise ValueError(
                    f"document {batch.index}: z-lab's loop gives other tokens:\n{tokens}\n{answer}"
                )
            left = len(answer) - 1
            for length in result.acceptance_lengths:
                if left > 0:
                    calls.append(min(length, left))
                left -= length
        return calls
