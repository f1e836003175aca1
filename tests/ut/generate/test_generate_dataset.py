"""All formats of a dataset give equal rows; a row that cannot be sent is named with a remedy."""

from __future__ import annotations

import json
import os
from array import array
from pathlib import Path
from typing import Any

import pytest
from generate_files import write_jsonl
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_hsx.generate.dataset import DatasetError
from vllm_ascend_hsx.generate.open_dataset import open_dataset
from vllm_ascend_hsx.generate.rows import Row, read_row

pa = pytest.importorskip("pyarrow", reason="Arrow and parquet are an optional extra")
TOKENS = [{"token_ids": [5, 1, 2]}, {"token_ids": [0]}, {"token_ids": [7] * 300}]
CHATS = [
    {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
    {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Who, ü?"}]},
]


def save_to_disk(folder: Path, table: Any) -> Path:
    """As `datasets` does: Arrow streams, and a list of them."""
    folder.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (table.slice(0, 1), table.slice(1)), strict=True):
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, part.schema) as writer:
            writer.write_table(part)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def every_form(folder: Path, records: list[dict[str, Any]]) -> list[Path]:
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(records)
    with pa.OSFile(str(folder / "file.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    (folder / "parts").mkdir()
    pq.write_table(table.slice(0, 2), folder / "parts" / "train-00000.parquet")
    pq.write_table(table.slice(2), folder / "parts" / "train-00001.parquet")
    pq.write_table(table, folder / "file.parquet", row_group_size=1)
    saved = save_to_disk(folder / "saved", table)
    return [write_jsonl(folder / "file.jsonl", records), folder / "file.arrow", folder / "file.parquet", folder / "parts", saved]


TEXTS = [{"prompt": "a"}, {"prompt": "\n b"}, {"prompt": "ü"}]


@pytest.mark.parametrize("records", [TOKENS, CHATS, TEXTS], ids=["tokens", "chats", "texts"])
def test_every_form_of_a_dataset_has_the_same_rows_and_the_same_digest(records: list[dict[str, Any]], tmp_path: Path) -> None:
    forms = every_form(tmp_path, records)
    rows = [list(open_dataset(path).rows()) for path in forms]
    assert rows == [rows[0]] * len(forms)
    assert [row.index for row in rows[0]] == list(range(len(records)))
    assert {open_dataset(path).check() for path in forms} == {open_dataset(forms[0]).check()}
    assert [row.index for path in forms for row in open_dataset(path).rows(lambda index: index == 1)] == [1] * len(forms)


def test_what_the_datasets_library_saves_has_these_rows_too(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="it is installed for speculators")
    for name, records in (("tokens", TOKENS), ("chats", CHATS)):
        data = datasets.Dataset.from_list(records)
        data.save_to_disk(tmp_path / name, num_shards=2)
        data.to_parquet(tmp_path / f"{name}.parquet")
        expected = open_dataset(write_jsonl(tmp_path / f"{name}.jsonl", records)).check()
        assert open_dataset(tmp_path / name).check() == open_dataset(tmp_path / f"{name}.parquet").check() == expected
    datasets.DatasetDict({"train": data}).save_to_disk(tmp_path / "splits")
    with pytest.raises(DatasetError, match="it holds the splits train"):
        open_dataset(tmp_path / "splits")
    assert open_dataset(tmp_path / "splits" / "train").check() == expected


def test_another_row_or_another_order_is_another_dataset(tmp_path: Path) -> None:
    last_changed = [*TOKENS[:2], {"token_ids": [7] * 299 + [8]}]
    changes = [TOKENS, TOKENS[::-1], TOKENS[:2], last_changed, [{"prompt": "5"}], [{"prompt": "5", "x": 1}]]
    digests = [open_dataset(write_jsonl(tmp_path / "d.jsonl", records)).check().digest for records in changes]
    assert len(set(digests)) == len(changes) - 1  # what is not sent does not count


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1), min_size=1))
def test_token_ids_arrive_as_they_were_written(lists: list[list[int]]) -> None:
    rows = [read_row(index, "input_ids", json.loads(json.dumps(each))) for index, each in enumerate(lists)]
    assert [row.body("m", 1, False, "p")["prompt"] for row in rows] == lists
    assert len({row.identity() for row in rows}) == len(set(map(tuple, lists)))


def test_a_conversation_becomes_a_chat_and_its_end_says_whether_an_answer_is_wanted() -> None:
    complete, question = (read_row(0, "conversations", each["conversations"]) for each in CHATS)
    assert complete.endpoint == "chat/completions"
    body = complete.body("m", 1, False, "p")
    assert body["messages"] == [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
    assert (body["add_generation_prompt"], question.body("m", 1, False, "p")["add_generation_prompt"]) == (False, True)
    assert body["return_token_ids"] is True
    # A server that extracts only what is requested is asked, too.
    assert body["kv_transfer_params"] == {"hidden_states": True, "include_output_tokens": False, "hidden_states_path": "p"}


def test_token_ids_are_sent_rather_than_the_conversation_that_they_were_made_from(tmp_path: Path) -> None:
    both = write_jsonl(tmp_path / "d.jsonl", [CHATS[0] | {"input_ids": [1, 2], "loss_mask": [0, 1]}])
    assert next(open_dataset(both).rows()) == Row(0, array("q", [1, 2]))
    assert next(open_dataset(both, "conversations").rows()).endpoint == "chat/completions"
    named = write_jsonl(tmp_path / "n.jsonl", [{"text": "a"}, {"text": [{"role": "user", "content": "b"}]}, {"text": [3]}])
    assert [type(row.content) for row in open_dataset(named, "text").rows()] == [str, list, array]


def test_blank_lines_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "a"}\n\n  \n{"prompt": "b"}')
    assert [(row.index, row.content) for row in open_dataset(path).rows()] == [(0, "a"), (1, "b")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a"', r"d.jsonl:3: it is not JSON .*; give one JSON object per line"),
        (b'{"prompt": "\xff"}', r"d.jsonl:3: it is not JSON"),
        (b"[" * 100_000, r"d.jsonl:3: it is not JSON"),
        (b"5", r"d.jsonl:3: it is not a JSON object"),
        (b'{"text": "a", "id": 4}', r"d.jsonl:3: it has none of token_ids, .*, only 'text', 'id'; name the column with --column"),
        (b'{"input_ids": [1, -4]}', r"d.jsonl:3: input_ids\[1\] is -4; token ids are numbers"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "b"}\n' + line + b"\n")
    with pytest.raises(DatasetError, match=message):
        open_dataset(path).check()


def test_a_list_of_all_rows_is_told_how_to_become_one(tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    path.write_text('[{"prompt": "a"},\n{"prompt": "b"}]')
    with pytest.raises(DatasetError, match=r"all.json:1: it is not JSON .* a list of all rows in one is not supported"):
        open_dataset(path).check()


def test_a_bad_row_of_a_table_is_named_by_file_and_row(tmp_path: Path) -> None:
    table = pa.table({"input_ids": pa.array([[1], [2], [3, None]]), "big": pa.array([[1], [2], [2**63]], pa.list_(pa.uint64()))})
    folder = save_to_disk(tmp_path / "saved", table)
    with pytest.raises(DatasetError, match=r"data-00001-of-00002.arrow, row 1: input_ids\[1\] is missing or null"):
        open_dataset(folder).check()
    with pytest.raises(DatasetError, match=r"data-00001-of-00002.arrow, row 1: big holds a number above 2\^63"):
        open_dataset(folder, "big").check()
    with pytest.raises(DatasetError, match="there is no 'text' here, only 'input_ids', 'big'; give --column"):
        open_dataset(folder, "text").check()


BAD = {3: [], 5: [1, -1], 6: None}  # row: what is no list of token ids


@pytest.mark.parametrize("form", ["lines", "arrow"])
def test_every_bad_row_is_named_in_one_go(form: str, tmp_path: Path) -> None:
    records = [{"token_ids": BAD.get(row, [row])} for row in range(8)]
    if form == "lines":
        path = write_jsonl(tmp_path / "data.jsonl", records)
        path.write_bytes(path.read_bytes() + b"{\n")
        places = [f"{path}:{number}" for number in (4, 6, 7, 9)]
    else:
        column = pa.array([each["token_ids"] for each in records], pa.list_(pa.int64()))
        path = save_to_disk(tmp_path / "saved", pa.table({"token_ids": column}))
        places = [f"{path}/data-00001-of-00002.arrow, row {row - 1}" for row in BAD]  # the first file has one row
    with pytest.raises(DatasetError) as refusal:
        open_dataset(path).check()
    first, *lines = str(refusal.value).splitlines()
    assert first == f"{path}: it cannot be sent, for {len(places)} reasons"
    said = ["token_ids is empty", "token_ids[1] is -1", "token_ids is missing or null", "it is not JSON"]
    assert len(lines) == len(places)
    for line, place, problem in zip(lines, places, said, strict=False):
        assert line.startswith(f"  {place}: {problem}")


def test_of_many_bad_rows_the_first_twenty_are_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [{"token_ids": []}] * 1000)
    with pytest.raises(DatasetError) as refusal:
        open_dataset(path).check()
    first, *lines = str(refusal.value).splitlines()
    assert first == f"{path}: it cannot be sent, for 20 reasons or more"
    assert [line.split(": ")[0] for line in lines] == [f"  {path}:{number}" for number in range(1, 21)]


def test_what_ends_the_reading_is_named_after_the_bad_rows(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"token_ids": pa.array([[1], []], pa.list_(pa.int64()))}), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"this is no table of any kind")
    with pytest.raises(DatasetError) as refusal:
        open_dataset(tmp_path).check()
    assert "a.parquet, row 1: token_ids is empty" in str(refusal.value).splitlines()[1]
    assert "b.parquet: it cannot be read" in str(refusal.value).splitlines()[2]


@pytest.mark.parametrize("name", ["bad.arrow", "bad.parquet"])
def test_a_table_that_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"this is no table of any kind")
    with pytest.raises(DatasetError, match=f"{name}: it cannot be read"):
        open_dataset(tmp_path / name).check()


def test_what_datasets_keeps_of_earlier_maps_is_no_part_of_the_dataset(tmp_path: Path) -> None:
    for name, prompt in (("cache-0123456789abcdef.arrow", "mapped"), ("train-00000.arrow", "its own")):
        table = pa.table({"prompt": [prompt]})
        with pa.OSFile(str(tmp_path / name), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    assert [row.content for row in open_dataset(tmp_path).rows()] == ["its own"]
    (tmp_path / "more.parquet").touch()
    with pytest.raises(DatasetError, match="it has more.parquet and train-00000.arrow; name a folder with one kind of files"):
        open_dataset(tmp_path)


def test_what_is_no_dataset_is_told_what_would_be_one(tmp_path: Path) -> None:
    nothing_in_it = r"no state.json .* no \*.parquet and no \*.arrow"
    cases = {"nothing": "it does not exist", "data.csv": "ends with none of .jsonl", "fifo.jsonl": "it is not a regular file"}
    os.mkfifo(tmp_path / "fifo.jsonl")
    (tmp_path / "data.csv").touch()
    (tmp_path / "empty").mkdir()
    for name, message in (*cases.items(), ("empty", nothing_in_it)):
        with pytest.raises(DatasetError, match=f"{name}: .*{message}"):
            open_dataset(tmp_path / name)
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(DatasetError, match="blank.jsonl: it has no rows"):
        open_dataset(tmp_path / "blank.jsonl").check()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", '{"_data_files": []}'),
        ("state.json", '{"_data_files": [{"filename": 5}]}'),
        ("state.json", '{"_data_files": [{"filename": "a\\u0000b"}]}'),
        ("state.json", '{"_data_files": [{"filename": "a\\ud800b"}]}'),
        ("state.json", "[" * 100_000),
        ("dataset_dict.json", '{"splits": []}'),
        ("dataset_dict.json", '{"splits": [["a"]]}'),
    ],
)
def test_what_datasets_would_not_have_written_is_named(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DatasetError, match=f"{name}: it is not what `datasets` writes: .*; save the dataset again"):
        open_dataset(tmp_path)


@pytest.mark.parametrize("form", ["arrow", "parquet"])
@pytest.mark.parametrize(
    ("column", "names", "values", "message"),
    [
        (None, ["prompt"], [pa.array([b"good", b"\xff"], pa.binary()).view(pa.string())], "row 1: prompt cannot be read: .*utf-8"),
        ("x", ["x"], [pa.array([2**55], pa.timestamp("ms"))], "row 0: x cannot be read: "),
        (None, ["prompt"], [pa.array([{"a": 1}])], "row 0: prompt is an object; give a text"),
        (None, ["messages"], [pa.array([{"role": "user"}])], "row 0: messages is an object; give a list of messages"),
        (None, ["prompt", "prompt"], [pa.array(["a"]), pa.array(["b"])], "there are 2 columns 'prompt'; rename all but one"),
    ],
    ids=["no UTF-8", "a time without end", "a struct", "a struct for a list", "a name twice"],
)
def test_a_value_that_python_has_no_object_for_is_named(
    form: str, column: str | None, names: list[str], values: list[pa.Array], message: str, tmp_path: Path
) -> None:
    import pyarrow.parquet as pq

    path, table = tmp_path / f"d.{form}", pa.Table.from_arrays(values, names=names)
    if form == "parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
    with pytest.raises(DatasetError, match=f"d.{form}.*{message}"):
        open_dataset(path, column).check()


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_an_arrow_file_that_becomes_shorter_while_it_is_read_is_named(tmp_path: Path, kind: str) -> None:
    path, table = tmp_path / "d.arrow", pa.table({"prompt": [f"{row} " + "x" * 1000 for row in range(300)]})
    with pa.OSFile(str(path), "wb") as sink, getattr(pa.ipc, f"new_{kind}")(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    rows = open_dataset(path, None).rows(lambda row: True)
    next(rows)
    os.truncate(path, 100)
    with pytest.raises(DatasetError, match="d.arrow"):
        list(rows)


def test_a_message_that_nests_too_deep_to_be_sent_is_named(tmp_path: Path) -> None:
    """The decoder's limit can be too deep for the encoder, which is called deeper in the stack."""
    path = tmp_path / "d.jsonl"
    for depth in (970, 978, 980, 982, 984):
        path.write_text('{"messages": [{"role": "user", "content": ' + "[" * depth + "]" * depth + "}]}")
        with pytest.raises(DatasetError, match="d.jsonl:1: "):
            open_dataset(path).check()


def test_of_several_splits_one_has_to_be_named(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DatasetError, match=rf"it holds the splits train, test; name one of them, such as --data {tmp_path}/train"):
        open_dataset(tmp_path)


def test_without_pyarrow_a_table_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    monkeypatch.delitem(__import__("sys").modules, "vllm_ascend_hsx.generate.tables", raising=False)
    (tmp_path / "d.parquet").touch()
    with pytest.raises(DatasetError, match=r"reading it needs pyarrow: pip install 'vllm-ascend-hsx\[data\]', or convert it to JSON lines"):
        open_dataset(tmp_path / "d.parquet")


def test_a_file_that_changes_between_check_and_use_is_told(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", TOKENS)
    dataset = open_dataset(path)
    dataset.check()
    write_jsonl(path, [*TOKENS, {"token_ids": [1]}])
    with pytest.raises(DatasetError, match="it was changed while it was read"):
        list(dataset.rows())


def test_no_row_is_given_once_its_file_has_changed(tmp_path: Path) -> None:
    """It would be sent under the number of a row of the content that was checked."""
    path = write_jsonl(tmp_path / "d.jsonl", [{"token_ids": [number]} for number in range(3000)])
    dataset = open_dataset(path)
    dataset.check()
    rows = dataset.rows()
    given = [next(rows)]
    write_jsonl(path, [{"token_ids": [number]} for number in range(3000)][::-1])
    with pytest.raises(DatasetError, match="put back what was checked and call again, or give what it is now an --output of its own"):
        given += rows
    assert [list(row.token_ids or ()) for row in given] == [[0]]


def test_a_large_dataset_is_read_in_little_memory(tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "d.jsonl"
    line = json.dumps({"input_ids": list(range(1000))}) + "\n"
    with open(path, "w") as file:
        file.writelines(line for _ in range(3000))
    dataset = open_dataset(path)
    reports: list[int] = []
    tracemalloc.start()
    try:
        assert dataset.check(reports.append).rows == 3000
        assert tracemalloc.get_traced_memory()[1] < 2_000_000  # of 13 MB
    finally:
        tracemalloc.stop()
    assert reports == [1000, 2000, 3000]
