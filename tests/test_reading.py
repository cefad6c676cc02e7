"""Every kind of bad row is a refusal with a place; the form of the source does not matter."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from dflash_ddp.data.reading import (
    Conversation,
    Rejected,
    content_hash,
    open_sources,
    parse_row,
    raw_rows,
)

GOOD = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
GOOD_LINE = json.dumps(GOOD).encode()


def parsed(raw):
    """The conversation or the refusal."""
    try:
        return parse_row(raw)
    except Rejected as refused:
        return refused


def read(path, **options):
    """All rows as (place, conversation or refusal)."""
    return [(row.place, parsed(row.raw)) for row in raw_rows(open_sources(str(path), **options))]


def write_lines(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def write_parquet(path: Path, rows: list[dict], **options) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path


def parse(row: dict):
    return parsed(json.dumps(row).encode())


def turns(*messages):
    return parse({"messages": list(messages)})


HALF = "text holds half of a surrogate pair"
BAD_LINES = {
    b'{"messages": [{"role": "user", "content": "caf\xe9"}]}': "text is not UTF-8",
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}': HALF,
    b'{"other": "\\uDFFF", ' + GOOD_LINE[1:]: HALF,
    b'{"messages": [{"role": "user", "cont': "line is not JSON",
    b"\xff\xfe{\x00}\x00": "text is not UTF-8",
    b"[1, 2]": "line is not a JSON object",
    b"{'messages': []}": "line is not JSON",
    b'{"a": ' + b"9" * 5000 + b"}": "line is not JSON",
    b"[" * 100_000: "nested too deeply",
    b'{"messages": [{"role": "user", "x": ' + b'{"a":' * 980 + b"1" + b"}" * 980 + b"}]}": None,
}


@pytest.mark.parametrize("bad", BAD_LINES, ids=lambda line: repr(line[:24]))
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_bad_line_is_refused_at_its_place_and_costs_no_other_row(tmp_path, bad, at):
    lines = [GOOD_LINE, GOOD_LINE]
    lines.insert(at, bad)
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\n".join(lines))  # no newline at the end: the last line may be cut off
    rows = read(file)
    assert [where for where, _ in rows] == [f"{file}:{line}" for line in (1, 2, 3)]
    refused = rows.pop(at)[1]
    assert isinstance(refused, Rejected)
    assert BAD_LINES[bad] in (None, refused.reason)
    assert all(isinstance(row, Conversation) for _, row in rows)


def test_only_line_ends_split_rows_and_blank_lines_are_none(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + GOOD_LINE + b"\r\n\r\n   \n\n" + GOOD_LINE)
    assert read(file) == [(f"{file}:{line}", Conversation(GOOD["messages"])) for line in (1, 5)]
    file.write_bytes(b"")
    assert read(file) == []
    text = "a\u2028b\u0085c\x0bd"
    row = {"messages": [{"role": "user", "content": text}]}
    write_lines(file, json.dumps(row, ensure_ascii=False).encode())
    assert read(file)[0][1].messages[0]["content"] == text


@pytest.mark.parametrize("user", ["human", "user", " USER "])
@pytest.mark.parametrize("answer", ["GPT", "bot", "chatgpt", "assistant", "model"])
@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_both_forms_of_turns_and_all_role_names(column, user, answer):
    pairs = [("System", "s"), (user, "q"), (answer, "a")]
    roles = ("system", "user", "assistant")
    expected = [{"role": role, "content": pair[1]} for role, pair in zip(roles, pairs, strict=True)]
    shared = parse({column: [{"from": role, "value": text, "weight": 1} for role, text in pairs]})
    assert shared == Conversation(expected)
    assert parse({column: [{"role": role, "content": text} for role, text in pairs]}) == shared


def test_roles_without_a_known_shape_are_refused_by_name():
    for role in ("function_call", "observation", "tool", "Narrator"):
        refused = parse(
            {"messages": [{"from": "human", "value": "q"}, {"from": role, "value": ""}]}
        )
        assert role in refused.reason
        assert "turn 1" in refused.detail
    for role in ("function", "", 7, ["user"], None):
        assert "unknown role" in turns({"role": role, "content": "q"}).reason


BAD_TURNS = [
    "hello",
    None,
    7,
    ["role", "user"],
    {"role": "user"},
    {"role": "user", "content": None},
    {"role": "user", "content": {"text": "q"}},
    {"role": "user", "content": ["q"]},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "user", "content": [{"type": "image"}]},
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": None, "tool_calls": []},
    {"text": "q"},
    {},
]


@pytest.mark.parametrize("bad", BAD_TURNS, ids=repr)
def test_a_turn_that_is_none_refuses_its_row_and_says_which(bad):
    for at in range(3):
        messages = list(GOOD["messages"])
        messages.insert(at, bad)
        refused = turns(*messages)
        assert isinstance(refused, Rejected)
        assert f"turn {at}" in refused.detail


def test_rows_without_messages():
    for messages in (None, "hi", [], {"role": "user"}, 3):
        assert "messages" in parse({"messages": messages}).reason
    assert "'text', 'id'" in parse({"text": "x", "id": 3}).detail


def test_tool_turns_pass_and_null_content_beside_a_call_is_legal():
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    row = turns(
        {"role": "user", "content": "q", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "name": None},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
    )
    assert row.messages == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},  # arguments: still a string
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        {"role": "assistant", "content": "a"},
    ]


def test_tools_as_list_or_json_text():
    tools = [{"type": "function", "function": {"name": "f", "description": None, "x": [None, 1]}}]
    clean = [{"type": "function", "function": {"name": "f", "x": [None, 1]}}]
    assert parse({**GOOD, "tools": tools}).tools == clean
    assert parse({**GOOD, "tools": json.dumps(tools)}).tools == clean
    assert parse({**GOOD, "tools": []}).tools is None
    assert parse({**GOOD, "tools": "null"}).tools is None
    for bad in ("{", '"f"', 3, [1], {"name": "f"}):
        assert "tools" in parse({**GOOD, "tools": bad}).reason


def tool_rows():
    """Rows whose structs differ, so that arrow pads each with the keys of the others."""
    rows = []
    for name, key, call in (("f", "a", True), ("g", "b", False), ("h", "c", True)):
        answer = {"role": "assistant", "content": "" if call else "text"}
        if call:
            answer["tool_calls"] = [{"function": {"name": name, "arguments": {key: name}}}]
        schema = {"name": name, "parameters": {"properties": {key: {"type": "string"}}}}
        tools = [{"type": "function", "function": schema}]
        messages = [{"role": "user", "content": name}, answer]
        rows.append({"messages": messages, "tools": tools, "extra": 1})
    return rows


def test_an_argument_may_be_text_in_one_row_and_a_number_in_another(tmp_path):
    rows = []
    for value in ("2025", 1690, [1], None, {"a": 1}):
        call = {"function": {"name": "f", "arguments": {"t": value}}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        rows.append({"messages": [{"role": "user", "content": "q"}, turn]})
    found = read(write_lines(tmp_path / "a.jsonl", *(json.dumps(row).encode() for row in rows)))
    calls = [row.messages[1]["tool_calls"][0]["function"] for _, row in found]
    values = [call["arguments"].get("t") for call in calls]
    assert values == ["2025", 1690, [1], None, {"a": 1}]


def test_parquet_gives_what_json_lines_give(tmp_path):
    lines = write_lines(tmp_path / "a.jsonl", *(json.dumps(row).encode() for row in tool_rows()))
    parquet = write_parquet(tmp_path / "a.parquet", tool_rows())
    padded = pyarrow.parquet.read_table(parquet).to_pylist()[0]["tools"][0]["function"]
    assert padded["parameters"]["properties"]["b"] is None  # the fault is there
    assert [row for _, row in read(parquet)] == [row for _, row in read(lines)]


def test_parquet_rows_are_numbered_across_batches_and_row_groups(tmp_path):
    rows = [{"messages": [{"role": "user", "content": str(row)}]} for row in range(1000)]
    parquet = write_parquet(tmp_path / "a.parquet", rows, row_group_size=300)
    for row, (where, conversation) in enumerate(read(parquet)):
        assert where == f"{parquet}[{row}]"
        assert conversation.messages[0]["content"] == str(row)


def test_undecodable_text_in_parquet_is_refused_alone(tmp_path):
    texts = pyarrow.array([b"one", b"caf\xe9", b"three"]).cast(pyarrow.binary())
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 3, texts.buffers())
    roles = pyarrow.array(["user"] * 3)
    turn = pyarrow.StructArray.from_arrays([roles, texts], ["role", "content"])
    column = pyarrow.ListArray.from_arrays(pyarrow.array([0, 1, 2, 3], pyarrow.int32()), turn)
    pyarrow.parquet.write_table(pyarrow.table({"messages": column}), tmp_path / "a.parquet")
    (_, first), (where, second), (_, third) = read(tmp_path / "a.parquet")
    assert where.endswith("[1]")
    assert second.reason == "text is not UTF-8"
    assert [row.messages[0]["content"] for row in (first, third)] == ["one", "three"]


def test_files_that_are_not_what_they_say(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match=r"a\.parquet"):
        read(tmp_path / "a.parquet")
    write_parquet(tmp_path / "b.parquet", [{"text": "x", "id": 1}])
    with pytest.raises(ValueError, match=r"b\.parquet .*\['text', 'id'\]"):
        read(tmp_path / "b.parquet")
    (tmp_path / "d.txt").write_bytes(GOOD_LINE)
    with pytest.raises(ValueError, match=r"d\.txt"):
        read(tmp_path / "d.txt")


def test_a_compressed_file_is_its_content_and_a_cut_one_is_refused(tmp_path):
    text = b"".join(GOOD_LINE + b"\n" for _ in range(3000))
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(text))
    places = [where for where, _ in read(file)]
    assert (places[0], places[-1]) == (f"{file}:1", f"{file}:3000")
    whole = file.read_bytes()
    for wrong in (whole[:-9], whole[: len(whole) // 2], whole[:-8] + b"01234567", text, b"\x1f"):
        file.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"a\.jsonl\.gz after line \d+"):
            read(file)


def test_a_json_file_may_be_one_array_of_rows(tmp_path):
    rows = [*tool_rows(), 7, {"messages": [{"role": "user", "content": "\ud800"}]}]
    lines = write_lines(tmp_path / "a.jsonl", *(json.dumps(row).encode() for row in rows))
    for indent, bom in ((None, b""), (2, b"\xef\xbb\xbf\r\n ")):
        file = tmp_path / f"{indent}.json"
        file.write_bytes(bom + json.dumps(rows, indent=indent).encode())
        found = read(file)
        assert [where for where, _ in found] == [f"{file}[{row}]" for row in range(len(rows))]
        assert list(map(repr, found[:3])) == [
            repr((f"{file}[{at}]", row)) for at, (_, row) in enumerate(read(lines)[:3])
        ]
        assert [row.reason for _, row in found[3:]] == ["line is not a JSON object", HALF]
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(ValueError, match=rf"{indent}\.json begins with \["):
            read(file)


def test_file_glob_and_directory(tmp_path, monkeypatch):
    for name in ("b.jsonl", "a.json", "deep/c.ndjson", "._a.json"):  # the last: a Mac's shadow
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_lines(tmp_path / name, GOOD_LINE)
    write_parquet(tmp_path / "d.parquet", [GOOD])
    (tmp_path / "README.md").write_text("not data")

    def names(path):
        return [Path(source.name).name for source in open_sources(str(path))]

    assert names(tmp_path) == ["a.json", "b.jsonl", "d.parquet"]
    assert names(tmp_path / "*.js*") == ["a.json", "b.jsonl"]
    assert names(tmp_path / "**" / "*.ndjson") == ["c.ndjson"]
    monkeypatch.chdir(tmp_path)
    assert names("?.jsonl") == ["b.jsonl"]
    odd = write_lines(tmp_path / "a=[1],(x).jsonl", GOOD_LINE)
    assert names(odd) == [odd.name]
    (tmp_path / "empty").mkdir()
    for missing in ("nothing.jsonl", "./nothing", "/a/b/c", "*.csv", "x/y/z", "empty"):
        with pytest.raises(ValueError, match=r"data\.path="):
            open_sources(missing)


def test_content_hash_follows_bytes_and_order_not_names(tmp_path):
    one, two = write_lines(tmp_path / "1.jsonl", GOOD_LINE), tmp_path / "2.jsonl"
    two.write_bytes(one.read_bytes())

    def hashed(path):
        return content_hash(open_sources(str(path)))

    assert hashed(one) == hashed(two)
    both = hashed(tmp_path)
    write_lines(two, GOOD_LINE.replace(b'"a"', b'"b"'))
    edited = hashed(tmp_path)
    # The border between two files counts: moving a line over it is another source.
    write_lines(one, GOOD_LINE, GOOD_LINE)
    two.write_bytes(b"")
    assert len({both, edited, hashed(one), hashed(two), hashed(tmp_path)}) == 5


def test_hub_data_sets_give_what_files_give(tmp_path, monkeypatch):
    """Also with a bad byte: JSON lines through `datasets` load with it and raise at access."""
    datasets = pytest.importorskip("datasets")
    lines = [json.dumps(row).encode() for row in tool_rows() * 100]
    file = write_lines(tmp_path / "a.jsonl", *lines)
    loaded = datasets.Dataset.from_list(tool_rows() * 100)
    monkeypatch.setattr(datasets, "load_dataset", lambda path, split, revision: loaded)
    rows = read("someone/some-set", split="train_sft", revision="abc")
    assert [row for _, row in rows] == [row for _, row in read(file)]
    assert rows[299][0] == "someone/some-set:train_sft[299]"
    assert content_hash(open_sources("someone/some-set"))
    monkeypatch.undo()

    bad = GOOD_LINE.replace(b'"q"', b'"caf\xe9"')
    write_lines(file, GOOD_LINE, GOOD_LINE, bad, GOOD_LINE)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    loaded = datasets.load_dataset(
        "json", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache")
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda path, split, revision: loaded)
    rows = [row for _, row in read("someone/some-set")]
    assert [isinstance(row, Rejected) for row in rows] == [False, False, True, False]


def test_hub_refusals_name_the_keys(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def refuse(path, split, revision):
        raise ValueError('Unknown split "train"')

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(ValueError, match=r"data\.split=train.*Unknown split"):
        open_sources("someone/some-set")
    with pytest.raises(ValueError, match=r"^data\.heldout=someone/some-set .*data\.heldout_split="):
        open_sources("someone/some-set", key="data.heldout")
    with pytest.raises(ValueError, match=r"^data\.heldout=none\.jsonl: there is no such file"):
        open_sources("none.jsonl", key="data.heldout")
