"""Tokenised documents on disk: complete or absent, never stale, alike for any number of workers."""

import json
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_ddp.data import store as store_module
from dflash_ddp.data import tokenising
from dflash_ddp.data.reading import Conversation
from dflash_ddp.data.rendering import Renderer, RenderSettings, render_row
from dflash_ddp.data.report import format_report
from dflash_ddp.data.store import DocumentStore, documents_in_both, prepare

TEMPLATE = """{% if messages[0].role != 'user' %}{{ raise_exception('No user query found') }}
{%- endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
START, END, MASK = 256, 257, 258  # the last one is no token of the tokenizer


def make_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {sign: number for number, sign in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


def settings(max_length: int = 200, mode: bool | None = None) -> RenderSettings:
    return RenderSettings(mode, frozenset({END}), max_length)


def row(question: str = "q", answer: str = "an answer") -> dict:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns}


def write(path: Path, *rows: dict | bytes) -> Path:
    lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in rows]
    path.write_bytes(b"\n".join(lines))
    return path


def make(path: Path, *, tokenizer=None, max_length: int = 200, mode=None, **options):
    options = {"cache_dir": path.parent / "cache", "max_bad_share": 0.05} | options
    return prepare(
        str(path), tokenizer or make_tokenizer(), settings=settings(max_length, mode), **options
    )


def directories(cache: Path) -> list[str]:
    return sorted(entry.name for entry in cache.iterdir())


def test_documents_come_back_as_rendered(tmp_path):
    rows = [row(f"question {i}", "answer " * (i % 5 + 1)) for i in range(700)]
    path = write(tmp_path / "a.jsonl", *rows)
    store = make(path, max_length=40)
    renderer = Renderer(make_tokenizer(), settings(40))
    assert store.num_documents == len(rows)
    for number, line in enumerate(rows):
        ((expected,), _) = render_row(renderer, Conversation(line["messages"]))
        ids, loss_mask = store.document(number)
        assert (ids.dtype, loss_mask.dtype) == (np.int32, bool)
        assert ids.tolist() == expected.ids.tolist()
        assert loss_mask.tolist() == expected.loss_mask.tolist()
        assert store.lengths[number] == len(ids) <= 40
        assert store.origin(number) == f"{path}:{number + 1}"
    assert store.lengths.dtype == np.int32
    assert store.num_tokens == store.lengths.sum() == store.report["num_tokens"]
    assert store.path.name == store.fingerprint
    with pytest.raises(ValueError, match="read-only"):
        store.document(0)[0][0] = 1
    assert directories(store.path.parent) == [store.fingerprint]


BAD = {
    b'{"messages": [{"role": "user", "content": "caf\xe9"}]}': "text is not UTF-8",
    b'{"messages": [{"role": "user"': "line is not JSON",
    b'{"text": "x"}': "no 'messages' or 'conversations'",
    b'{"messages": [{"role": "assistant", "content": "x y"}]}': "the answer has no prompt",
    b'{"messages": [{"role": "system", "content": "x"}]}': "no assistant turn",
    b'{"messages": [{"role": "tool", "content": "x"}, {"role": "user", "content": "x"}, '
    b'{"role": "assistant", "content": "x"}]}': "template: No user query found",
    b'{"conversations": [{"from": "observation", "value": "x"}]}': "unknown role 'observation'",
}


def test_bad_rows_are_counted_by_reason_with_their_place(tmp_path):
    path = write(tmp_path / "a.jsonl", *(line for bad in BAD for line in (bad, row())))
    report = make(path, max_bad_share=0.5).report
    assert report["num_rows"] == 2 * len(BAD)
    assert report["num_rows_kept"] == report["num_documents"] == report["num_bad_rows"] == len(BAD)
    dropped, text = report["dropped_rows"], format_report(report)
    assert list(dropped) == list(BAD.values())
    for number, reason in enumerate(BAD.values()):
        assert dropped[reason]["count"] == 1
        assert dropped[reason]["examples"][0].startswith(f"{path}:{2 * number + 1}: ")
        assert f"1 x {reason} (first: {path}:{2 * number + 1}: " in text
    assert "14 read, 7 kept" in text


def test_too_many_bad_rows_are_an_error_fresh_and_cached(tmp_path):
    path = write(tmp_path / "a.jsonl", b"{", row(), row(), row())
    for _ in range(2):
        with pytest.raises(ValueError, match=r"25\.0% of the rows are bad[\s\S]*a\.jsonl:1"):
            make(path, max_bad_share=0.2)
    assert make(path, max_bad_share=0.25).num_documents == 3


def test_rows_lost_to_their_length_are_no_bad_rows(tmp_path):
    path = write(tmp_path / "a.jsonl", row("q" * 300), row(answer=""), row())
    report = make(path, max_bad_share=0.0).report
    assert (report["num_rows_kept"], report["num_bad_rows"]) == (1, 0)
    assert sum(entry["count"] for entry in report["dropped_rows"].values()) == 2


@pytest.mark.parametrize("content", [(), (b"{", b"x"), (row("q" * 300),), (b"", b"  ")])
def test_nothing_left_is_an_error_with_the_reasons_and_leaves_nothing(tmp_path, content):
    path = write(tmp_path / "a.jsonl", *content)
    with pytest.raises(ValueError, match="no usable row among those of") as error:
        make(path, max_bad_share=1.0)
    assert str(path) in str(error.value)
    assert ("behind max_length" in str(error.value)) == (content == (row("q" * 300),))
    assert directories(tmp_path / "cache") == []


def test_the_report_adds_up_with_many_kinds_of_rows(tmp_path):
    rows = [row("q" * (i % 90), "a" * (i % 70)) for i in range(300)]
    rows += [{"messages": [{"role": f"r{i}", "content": "x"}]} for i in range(60)]
    store = make(write(tmp_path / "a.jsonl", *rows), max_length=100, max_bad_share=1)
    report = store.report
    dropped = report["dropped_rows"].values()
    assert report["num_rows"] == 360
    assert report["num_rows"] == report["num_rows_kept"] + sum(found["count"] for found in dropped)
    assert len(dropped) <= 41  # sixty unknown roles do not make sixty lines
    assert all(1 <= len(found["examples"]) <= 3 for found in dropped)
    masks = [store.document(number)[1] for number in range(store.num_documents)]
    assert report["num_supervised_tokens"] == sum(int(mask.sum()) for mask in masks)
    assert report["num_truncated"] == sum(int(length == 100) for length in store.lengths) > 0


@pytest.mark.parametrize("max_length", [100, 64, 37])
def test_the_histogram_counts_every_document_once_in_its_bin(tmp_path, max_length):
    rows = [row("", "a" * (i % 90 + 1)) for i in range(300)]
    store = make(write(tmp_path / "a.jsonl", *rows), max_length=max_length)
    below = 0
    for most, count in store.report["lengths"]:
        expected = [length for length in store.lengths.tolist() if below < length <= most]
        assert count == len(expected)
        below = most
    assert below == max_length >= store.lengths.max()
    assert sum(count for _, count in store.report["lengths"]) == store.num_documents
    assert f"<={max_length}: {count}" in format_report(store.report)


def test_heldout_documents_among_the_training_text_are_found(tmp_path):
    training = [row(f"q{i % 50}", "a" * (i % 7 + 2)) for i in range(400)]
    heldout = [row("new", "b b"), training[123], row("new", "c c"), training[0], training[123]]
    text = make(write(tmp_path / "text.jsonl", *training))
    other = make(write(tmp_path / "heldout.jsonl", *heldout))
    found = documents_in_both(text, other, 10)
    assert {heldout[number]["messages"][0]["content"] for number in found} == {"q23", "q0"}
    for number, document in found.items():
        assert text.document(document)[0].tolist() == other.document(number)[0].tolist()
    assert documents_in_both(text, other, 1) == {}  # only those that are used count
    assert documents_in_both(text, text, 400).keys() == {
        max(n for n, line in enumerate(training) if line == one) for one in training
    }


def test_text_that_changes_while_it_is_read_is_not_kept(tmp_path, monkeypatch):
    """Its hash was taken before: kept under it, other text would be used for ever."""
    path = write(tmp_path / "a.jsonl", *[row(f"{i}") for i in range(50)])
    real = store_module.raw_rows

    def appended(sources):
        for number, raw in enumerate(real(sources)):
            if number == 40:
                with path.open("ab") as file:
                    file.write(b"\n" + json.dumps(row("late")).encode())
            yield raw

    monkeypatch.setattr(store_module, "raw_rows", appended)
    with pytest.raises(ValueError, match=r"a\.jsonl.*changed while it was read"):
        make(path)
    assert directories(tmp_path / "cache") == []
    monkeypatch.undo()
    assert make(path).num_documents == 51


def test_a_row_that_breaks_the_code_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", row(), row(), row())
    monkeypatch.setattr(tokenising, "render_row", lambda renderer, row: 1 // 0)
    with pytest.raises(ZeroDivisionError) as broken:
        make(path)
    assert f"{path}:1" in broken.value.__notes__[0]


def test_answers_refused_from_kept_rows_are_counted(tmp_path):
    turns = row("q", "a b")["messages"]
    path = write(tmp_path / "a.jsonl", {"messages": turns[1:] + turns}, row())
    template = TEMPLATE.replace("messages[0].role != 'user'", "false")
    report = make(path, tokenizer=make_tokenizer(template)).report
    assert (report["num_rows_kept"], report["dropped_rows"]) == (2, {})
    assert report["dropped_answers"]["the answer has no prompt"]["count"] == 1
    assert f"1 x the answer has no prompt (first: {path}:1: " in format_report(report)


def test_every_change_of_what_matters_is_seen(tmp_path):
    """Length, mode, template, tokenizer, one edited row: each tokenises again, with its effect."""
    path = write(tmp_path / "a.jsonl", row(), row(answer="b" * 90))
    first = make(path)
    assert make(path).path == first.path
    shorter = make(path, max_length=64)
    assert (shorter.lengths.max(), first.lengths.max()) == (64, 112)
    other_template = make(
        path, tokenizer=make_tokenizer(TEMPLATE.replace("\n{% endfor", "{% endfor"))
    )
    assert other_template.lengths[0] < first.lengths[0]
    added = make_tokenizer()
    added.add_tokens(["answer"])
    other_tokenizer = make(path, tokenizer=added)
    assert other_tokenizer.lengths[0] < first.lengths[0]
    mode = make(path, mode=True)
    write(path, row(), row(answer="c" * 90))
    edited = make(path)
    stores = [first, shorter, other_template, other_tokenizer, mode, edited]
    assert len({store.fingerprint for store in stores}) == len(stores)
    assert mode.report["enable_thinking"] is True
    moved = tmp_path / "b.jsonl"
    path.rename(moved)
    assert make(moved).path == edited.path


def test_a_new_code_version_is_seen(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", row())
    first = make(path)
    monkeypatch.setattr(store_module, "FORMAT", store_module.FORMAT + 1)
    assert make(path).path != first.path
    with pytest.raises(ValueError, match=f"format {store_module.FORMAT - 1}"):
        DocumentStore(first.path)


@pytest.mark.parametrize("name", ["tokens.bin", "loss_mask.bin", "report.json"])
def test_a_damaged_directory_is_refused(tmp_path, name):
    file = make(write(tmp_path / "a.jsonl", row())).path / name
    if name == "report.json":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match=str(file.parent)):
        DocumentStore(file.parent)


def test_mask_token_and_table_are_checked_against_all_ids(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "_SCAN_TOKENS", 16)
    added = make_tokenizer()
    added.add_tokens(["zzz"])  # id 258
    path = write(tmp_path / "a.jsonl", b"", row(), row(), row(answer="so zzz it is"), row())
    store = make(path, tokenizer=added)
    assert store.check_ids(300, 299) is None
    for table_rows, mask, place in (
        (300, 258, "id 258 .*document 2, from .*a.jsonl:4; .*mask_token_id=258 must not occur"),
        (258, 0, "id 258 .*document 2, from .*a.jsonl:4; ids must be below 258"),
        (300, END, "id 257 .*document 0, .*a.jsonl:2; .*mask_token_id=257"),  # mask = pad = eos
    ):
        with pytest.raises(ValueError, match=place):
            store.check_ids(table_rows, mask)
    for mask in (300, -1):
        with pytest.raises(ValueError, match=rf"mask_token_id={mask} must lie in 0\.\.299"):
            store.check_ids(300, mask)


def test_workers_change_nothing(tmp_path):
    rows = [row(f"question {i}", "answer " * (i % 7)) for i in range(3000)]
    rows[700:700] = list(BAD)
    path = write(tmp_path / "a.jsonl", *rows)  # more rows than are in flight at once
    one = make(path, cache_dir=tmp_path / "one", num_workers=1)
    two = make(path, cache_dir=tmp_path / "two", num_workers=2)
    for name in ("tokens.bin", "loss_mask.bin", "offsets.bin", "origins.txt", "report.json"):
        assert (one.path / name).read_bytes() == (two.path / name).read_bytes()


def _prepare_in_a_process(path: str, barrier) -> None:
    barrier.wait()
    store = make(Path(path))
    assert store.num_documents == 2000
    assert store.document(1999)[0][0] == START


def test_processes_that_race_share_one_directory(tmp_path):
    path = write(tmp_path / "a.jsonl", *[row(f"q{i}") for i in range(2000)])
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    racers = [
        context.Process(target=_prepare_in_a_process, args=(str(path), barrier)) for _ in range(2)
    ]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
    assert [racer.exitcode for racer in racers] == [0, 0]
    assert directories(tmp_path / "cache") == [make(path).fingerprint]


def test_threads_that_race_share_one_directory(tmp_path):
    for attempt in range(5):
        path = write(tmp_path / f"{attempt}.jsonl", *[row(f"{attempt} {i}") for i in range(20)])
        stores: list = []
        gate = threading.Barrier(4)

        def work(path=path, stores=stores, gate=gate):
            gate.wait()
            stores.append(make(path))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert [store.num_documents for store in stores] == [20] * 4
    assert len(directories(tmp_path / "cache")) == 5


def test_a_full_disk_leaves_nothing_and_the_next_run_works(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", row())

    def refuse(file):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "flush", refuse)
        with pytest.raises(OSError, match="No space"):
            make(path)
    assert directories(tmp_path / "cache") == []
    assert make(path).num_documents == 1


def test_progress_and_modes_are_logged(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(store_module, "_LOG_EVERY_ROWS", 500)
    path = write(tmp_path / "a.jsonl", *[row()] * 600)
    with caplog.at_level(logging.INFO):
        make(path, mode=False)
        make(path, mode=False)
    assert "does not know enable_thinking=False" in caplog.text
    assert "tokenised 500 rows" in caplog.text
    assert "using tokenised documents" in caplog.text


SCRIPT = """
if __name__ == "__main__":
    import sys
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from test_store import make

    make(Path({path!r}), num_workers=2)
"""


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]


def ignores_interrupt(pid: int) -> bool:
    (ignored,) = re.findall(r"SigIgn:\t(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(ignored, 16) >> (signal.SIGINT - 1) & 1)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_a_stopped_run(tmp_path, sign):
    """Ctrl-C goes to all processes and the parent answers; a killed parent cannot answer at all."""
    path = write(tmp_path / "a.jsonl", *[row("q", "word " * 400)] * 10000)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), path=str(path)))
    run = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    workers: list[int] = []
    for _ in range(600):  # until documents are written and both workers have started
        time.sleep(0.05)
        written = [file.stat().st_size for file in (tmp_path / "cache").glob(".*/tokens.bin")]
        workers = children(run.pid)
        if any(written) and len(workers) >= 2 and all(map(ignores_interrupt, workers)):
            break
    assert any(written)
    assert len(workers) >= 2
    if sign is signal.SIGINT:
        os.killpg(run.pid, sign)
    else:
        os.kill(run.pid, sign)
    _, errors = run.communicate(timeout=20)
    for _ in range(200):
        alive = [worker for worker in workers if Path(f"/proc/{worker}/stat").exists()]
        if not alive:
            break
        time.sleep(0.05)
    assert alive == []
    if sign is signal.SIGINT:
        assert b"KeyboardInterrupt" in errors
        assert errors.count(b"Traceback") == 1  # the parent's; no worker dies loudly
        assert directories(tmp_path / "cache") == []
