"""Whatever bytes a data file holds, the run gets rows, counted refusals, or one message with the file's name.

Files are random bytes, and valid files that were cut, flipped, spliced or doubled. Seeds are fixed; a longer search:

    DFLASH_FUZZ_ROUNDS=200 python -m pytest tests/test_fuzz.py
"""

import gzip
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from test_reading import GOOD, tool_rows
from test_store import make_tokenizer, settings

from dflash_ddp.data.reading import Rejected, open_sources, parse_row, raw_rows
from dflash_ddp.data.store import DocumentStore, prepare
from dflash_ddp.data.tokenising import tokenised_rows

ROUNDS = int(os.environ.get("DFLASH_FUZZ_ROUNDS", "1"))
RANDOM_BYTES = 10_000
MUTANTS = 1_000  # of each valid file, a round

ROWS = [*tool_rows(), GOOD, {"conversations": [{"from": "human", "value": "\u00e9 \U0001f600"}]}]
LINES = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
TOKENS = [b"{", b"}", b"[", b"]", b'"', b"\\", b"\\ud800", b"\x00", b"\xff", b"\xef\xbb\xbf", b"\n"]
TOKENS += [
    b"null",
    b"NaN",
    b"1e999",
    b"-",
    b'"role"',
    b'"content"',
    b"<|im_end|>",
    b"\r",
    b"[" * 3000,
]


def parquet_bytes(folder: Path) -> bytes:
    rows = pyarrow.Table.from_pylist(tool_rows() * 20)
    pyarrow.parquet.write_table(rows, folder / "valid.parquet", row_group_size=25)
    return (folder / "valid.parquet").read_bytes()


VALID: dict[str, Callable[[Path], bytes]] = {
    "jsonl": lambda folder: LINES,
    "jsonl.gz": lambda folder: gzip.compress(LINES, mtime=0),
    "json": lambda folder: json.dumps(ROWS, indent=1).encode(),
    "parquet": parquet_bytes,
}


def mutant(valid: bytes, rng: random.Random) -> bytes:
    """The file with one to five wounds."""
    text = bytearray(valid)
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(text) + 1)
        end = at + rng.choice([1, 4, 40, 400])
        match rng.randrange(6):
            case 0:
                del text[at:]
            case 1:
                del text[at:end]
            case 2:
                text[at:end] = rng.randbytes(end - at)
            case 3:
                text[at:at] = rng.choice(TOKENS)
            case 4:
                text[at:end] = rng.choice(TOKENS)
            case _:
                text[at:at] = text[at:end]
    return bytes(text)


def outcome(file: Path) -> str:
    """`rows`, `refused` or `message`; any other exception passes through and fails the test."""
    found = "refused"
    try:
        for row in raw_rows(open_sources(str(file))):
            assert row.place.startswith(str(file))
            try:
                parse_row(row.raw)
                found = "rows"
            except Rejected:
                pass
    except ValueError as error:
        text = str(error)
        assert str(file) in text
        return "message"
    return found


@pytest.mark.parametrize("suffix", VALID)
def test_random_bytes(tmp_path, suffix):
    file = tmp_path / f"noise.{suffix}"
    for seed in range(4 * ROUNDS):
        noise = random.Random(seed).randbytes(RANDOM_BYTES)
        for head in (b"", b"{", b"[", b"PAR1", b"\x1f\x8b\x08\x00"):
            file.write_bytes(head + noise + b"PAR1")
            assert outcome(file) in ("refused", "message")


@pytest.mark.parametrize("suffix", VALID)
def test_wounded_files(tmp_path, suffix):
    valid = VALID[suffix](tmp_path)
    file = tmp_path / f"wounded.{suffix}"
    file.write_bytes(valid)
    assert outcome(file) == "rows"
    found = {"rows": 0, "refused": 0, "message": 0}
    for seed in range(MUTANTS * ROUNDS):
        file.write_bytes(mutant(valid, random.Random(seed)))
        found[outcome(file)] += 1
    # A wound costs a line of JSON lines, and the whole of a file that is read as one.
    assert found["rows" if suffix == "jsonl" else "message"] > MUTANTS // 4, found


def test_wounded_documents_in_the_cache(tmp_path):
    """Each file of a store in turn: it opens, with as many tokens as lengths, or says what to do."""
    store = prepare_rows(tmp_path)
    wounds, said = 0, set()
    for name in ("report.json", "offsets.bin", "tokens.bin", "loss_mask.bin"):
        valid = (store / name).read_bytes()
        for seed in range(60 * ROUNDS):
            (store / name).write_bytes(mutant(valid, random.Random(seed)))
            try:
                opened = DocumentStore(store)
            except ValueError as error:
                said.add(str(error).partition(" is damaged: ")[0])
                wounds += 1
                continue
            assert opened.lengths.sum() == opened.num_tokens
            assert [len(opened.document(n)[0]) for n in range(opened.num_documents)]
        (store / name).write_bytes(valid)
    assert wounds > 60
    assert said == {str(store)}


def value(rng: random.Random, depth: int = 0) -> object:
    """Any JSON value, with a liking for the words that rows are made of."""
    words = ["user", "assistant", "system", "tool", "a b", "", "<|im_end|>", "\x00", "\u2028"]
    match rng.randrange(8 if depth < 4 else 5):
        case 0:
            return None
        case 1:
            return rng.choice([0, -1, 1.5, 1e308, 10**30, True, False])
        case 2 | 3 | 4:
            return rng.choice(words)
        case 5:
            return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
        case _:
            keys = ["role", "content", "from", "value", "tool_calls", "function", "name", "text"]
            return {rng.choice(keys): value(rng, depth + 1) for _ in range(rng.randrange(4))}


def replaced(node: object, rng: random.Random) -> object:
    """A copy of a row in which some values are others."""
    if rng.random() < 0.06:
        return value(rng)
    if isinstance(node, dict):
        return {key: replaced(item, rng) for key, item in node.items() if rng.random() > 0.03}
    if isinstance(node, list):
        return [replaced(item, rng) for item in node for _ in range(rng.choice([0, 1, 1, 1, 1, 2]))]
    return node


CALLS = (
    "{% for m in messages if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name + 'x' }}"
)
CALLS += "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}{{ tools | tojson }}"


def prepare_rows(folder: Path) -> Path:
    (folder / "rows.jsonl").write_bytes(LINES)
    options = {"settings": settings(64), "cache_dir": folder / "cache", "max_bad_share": 1.0}
    return prepare(str(folder / "rows.jsonl"), make_tokenizer(), **options).path


def test_rows_of_wrong_types_reach_documents_or_a_reason(tmp_path):
    """Through the template and the tokenizer, with tool calls read as templates read them."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CALLS + str(tokenizer.chat_template)
    lines = []
    for seed in range(600 * ROUNDS):
        rng = random.Random(seed)
        lines.append(json.dumps(replaced(rng.choice(ROWS), rng)).encode())
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
    rows = raw_rows(open_sources(str(tmp_path / "rows.jsonl")))
    done = list(tokenised_rows(rows, tokenizer, settings=settings(64), num_workers=0))
    assert len(done) == len(lines)
    assert all(row.documents or row.rejected for row in done)
    assert sum(bool(row.documents) for row in done) > len(done) // 20
    reasons = {refused.reason for row in done for refused in row.rejected}
    assert len(reasons) > 8
    for row in done:
        for ids, loss_mask, _ in row.documents:
            assert len(ids) == len(loss_mask) <= 64
            assert (loss_mask[:-1] & loss_mask[1:]).any()
