"""The unit of the stream, and the shape legend of the package.

A packed batch is documents laid end to end: `input_ids`, `positions` (each document starts again at 0) and
`loss_mask` (the tokens that the target would generate). A target rank turns one into context features `[n, C]`;
a drafter rank reads the same packed batch from the schedule and joins the two. Both sides hold it as numpy arrays
in host memory: anchors, labels and masks are decided there, so the GPU is never asked a question.

Shape letters, used as suffixes of names (`features_SC`, `labels_NB`):

    S  packed tokens of a batch (the token budget)   N  anchors (= blocks) of a batch   B  block size
    Q  = N * B draft positions                       K  capture layers                  H  hidden size
    C  = K * H context feature width                 V  vocabulary (rows of the target's table)
    A  query heads      G  key/value heads           D  head dimension
"""

import zlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Documents laid end to end; n <= S tokens in all.

    Attributes:
        index: number of the batch in its sequence (training or held-out).
        input_ids: int32 [n], token ids.
        positions: int32 [n], position inside the document; 0 starts a document.
        loss_mask: bool [n], True on tokens that the target would generate.
        document_lengths: int32 [d], tokens of each document, in order; they sum to n.
        document_ids: int64 [d], row numbers in the tokenised data, for reports.
    """

    index: int
    input_ids: np.ndarray
    positions: np.ndarray
    loss_mask: np.ndarray
    document_lengths: np.ndarray
    document_ids: np.ndarray

    @property
    def num_tokens(self) -> int:
        """Real tokens n in this batch."""
        return len(self.input_ids)

    def digest(self) -> int:
        """CRC-32 of ids, positions and mask: what a drafter compares with a header."""
        crc = zlib.crc32(self.input_ids.astype(np.int32).tobytes())
        crc = zlib.crc32(self.positions.astype(np.int32).tobytes(), crc)
        return zlib.crc32(self.loss_mask.astype(np.uint8).tobytes(), crc)
