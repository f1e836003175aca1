"""All forms of a dataset give equal rows. Unreadable data is reported with a remedy."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import sys
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from generate_files import write_jsonl
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_hsx.generate.columns import read_row
from vllm_ascend_hsx.generate.dataset import BadRow, Checked, Dataset, DatasetError
from vllm_ascend_hsx.generate.open_dataset import open_dataset
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.rows import Row

datasets = pytest.importorskip("datasets", reason="all but JSON lines is an optional extra")
pa = pytest.importorskip("pyarrow", reason="it comes with datasets")
TOKENS = [{"token_ids": [5, 1, 2]}, {"token_ids": [0]}, {"token_ids": [7] * 300}]
CHATS = [
    {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
    {
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "Who, ü?"},
        ]
    },
]
TEXTS = [{"prompt": "null"}, {"prompt": "\n b"}, {"prompt": 'ü, "12"'}]
# The arguments of tools differ from row to row. Arrow has all keys in all rows.
CALLS = [
    {
        "messages": [
            {"role": "user", "content": "?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": "c",
                        "type": "function",
                        "function": {"name": "f", "arguments": arguments},
                    }
                ],
            },
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "parameters": {"type": "object", "properties": properties},
                },
            }
        ],
    }
    for arguments, properties in (
        ({"town": "Oslo"}, {"town": {"type": "string"}}),
        ({"a": 17, "b": 3}, {"a": {"type": "integer"}}),
    )
]
RECORDS = {"tokens": TOKENS, "chats": CHATS, "texts": TEXTS, "calls": CALLS}


@pytest.fixture(autouse=True)
def _caches_of_its_own(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def opened(path: object, **options: Any) -> Dataset:
    return open_dataset(Options(str(path), Path("out"), **options))


def checked(path: object, **options: Any) -> Checked:
    return opened(path, **options).check({})


def bad(path: object, **options: Any) -> list[str]:
    """Return the rows that cannot be sent, with their positions."""
    return [f"{each.where}: {each.problem}" for each in checked(path, **options).bad]


def write_csv(path: Path, records: list[dict[str, Any]]) -> Path:
    import csv

    with open(path, "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(
            file, list(records[0]), delimiter="\t" if path.suffix == ".tsv" else ","
        )
        writer.writeheader()
        for record in records:
            writer.writerow(
                {
                    name: value if isinstance(value, str) else json.dumps(value)
                    for name, value in record.items()
                }
            )
    return path


def packed(path: Path) -> list[Path]:
    """Return the same file as .gz and .zst, in one part and in two parts."""
    made = [path.with_name(f"{path.name}.gz"), path.with_name(f"{path.name}.zst")]
    made[0].write_bytes(gzip.compress(path.read_bytes()))
    with pa.CompressedOutputStream(str(made[1]), "zstd") as file:
        file.write(path.read_bytes())
    return made


def save_to_disk(folder: Path, table: Any) -> Path:
    datasets.Dataset(table).save_to_disk(folder, num_shards=2)
    return folder


def every_form(folder: Path, records: list[dict[str, Any]]) -> list[Path]:
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(records)
    with (
        pa.OSFile(str(folder / "file.arrow"), "wb") as file,
        pa.ipc.new_file(file, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=2)
    with (
        pa.OSFile(str(folder / "stream.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=2)
    pq.write_table(table, folder / "file.parquet", row_group_size=1)
    parts = [folder / name for name in ("tables", "lines", "packed", "both/data")]
    for part in parts:
        part.mkdir(parents=True)
    for number, (start, stop) in enumerate(((0, 1), (1, len(records)))):
        for part in (parts[0], parts[3]):
            pq.write_table(table.slice(start, stop - start), part / f"train-{number:05d}.parquet")
        write_jsonl(parts[1] / f"{number:05d}.jsonl", records[start:stop])
        (parts[2] / f"{number:05d}.jsonl.gz").write_bytes(
            gzip.compress((parts[1] / f"{number:05d}.jsonl").read_bytes())
        )
    lines, a_list, pretty = (
        write_jsonl(folder / "file.jsonl", records),
        folder / "list.json",
        folder / "pretty.json",
    )
    a_list.write_text(json.dumps(records))
    pretty.write_bytes(
        b"\xef\xbb\xbf\n" + json.dumps(records, indent=2, ensure_ascii=False).encode()
    )
    separated = [write_csv(folder / name, records) for name in ("file.csv", "file.tsv")]
    tables = [folder / name for name in ("file.arrow", "stream.arrow", "file.parquet")]
    texts = [lines, a_list, pretty, *separated]
    return [
        *texts,
        *(each for path in texts for each in packed(path)),
        *tables,
        *parts[:3],
        folder / "both",
        save_to_disk(folder / "saved", table),
    ]


@pytest.mark.parametrize("kind", RECORDS)
def test_every_form_of_a_dataset_has_the_same_rows(kind: str, tmp_path: Path) -> None:
    records = RECORDS[kind]
    forms = every_form(tmp_path, records)
    expected = [
        read_row(index, record, Options("", Path()), Counter())
        for index, record in enumerate(records)
    ]
    for path in forms:
        assert list(opened(path).rows()) == expected, path
        assert [row.index for row in opened(path).rows(lambda index: index == 1)] == [1]
        found, count = checked(path), checked(forms[0])
        assert found == count and len(found.identities) == len(records)


def test_split_must_be_selected_if_there_are_several(tmp_path: Path) -> None:
    made = datasets.DatasetDict(
        {
            name: datasets.Dataset.from_list(TOKENS[:rows])
            for name, rows in (("train", 3), ("test", 1))
        }
    )
    made.save_to_disk(tmp_path / "saved")
    (tmp_path / "files" / "data").mkdir(parents=True)
    for name, part in made.items():
        part.to_parquet(tmp_path / "files" / "data" / f"{name}-00000.parquet")
    for folder in ("saved", "files"):
        assert len(checked(tmp_path / folder, split="test").identities) == 1
        for split in (None, "dev"):
            with pytest.raises(
                DatasetError,
                match=f"{folder}: the dataset has the splits train, test; choose one with --split",
            ):
                opened(tmp_path / folder, split=split)


def test_a_dataset_of_a_hub_is_read_from_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = datasets.DatasetDict(
        {
            "train": datasets.Dataset.from_list(TOKENS),
            "test": datasets.Dataset.from_list(TOKENS[:1]),
        }
    )
    made.save_to_disk(tmp_path / "cache")
    asked: list[Any] = []
    load, cached = datasets.load_dataset, datasets.load_from_disk(tmp_path / "cache")

    def of_the_hub(*arguments: Any, **options: Any) -> Any:
        if arguments[0] in ("arrow", "parquet"):
            return load(*arguments, **options)
        asked.append(arguments)
        return cached

    monkeypatch.setattr("datasets.load_dataset", of_the_hub)
    assert len(checked("some-one/some.thing", split="train").identities) == 3
    assert len(checked("some-one/some.thing:en", split="test").identities) == 1
    assert asked == [("some-one/some.thing", None), ("some-one/some.thing", "en")]
    # An existing path takes precedence.
    monkeypatch.chdir(tmp_path)
    save_to_disk(tmp_path / "some-one" / "some.thing", pa.Table.from_pylist(TOKENS))
    assert len(checked("some-one/some.thing").identities) == 3
    assert len(asked) == 2


def test_error_for_an_unknown_dataset_names_path_and_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*arguments: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    neither = "no such file or folder, and not the id of a dataset on a hub, which is OWNER/NAME or OWNER/NAME:CONFIG"
    for name in (
        tmp_path / "nothing",
        "nothing",
        "data/train.jsonl",
        "data/train.parquet",
        "data/train.csv.gz",
    ):
        with pytest.raises(DatasetError, match=f"{name}: {neither}"):
            opened(name)
    with pytest.raises(
        DatasetError,
        match=(
            "some/thing: cannot be read: Couldn't reach the Hub; give a readable file "
            "or folder, or the id of a dataset"
        ),
    ):
        opened("some/thing")


@pytest.mark.parametrize(
    "text",
    ["".join(json.dumps(each) + "\n" for each in TEXTS), json.dumps(TEXTS, indent=1)],
    ids=["lines", "list"],
)
def test_the_standard_input_is_read_twice(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    dataset = opened("-")
    assert len(dataset.check({}).identities) == len(TEXTS)
    assert [row.content for row in dataset.rows()] == [each["prompt"] for each in TEXTS]


def test_bad_row_of_standard_input_is_reported_with_line_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}\n{"prompt": ""}\n'))
    )
    assert bad("-") == ["standard input:2: prompt is empty; remove this row"]


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1), min_size=1))
def test_token_ids_arrive_as_they_were_written(lists: list[list[int]]) -> None:
    records = [json.loads(json.dumps({"input_ids": each})) for each in lists]
    rows = [
        read_row(index, record, Options("", Path()), Counter())
        for index, record in enumerate(records)
    ]
    assert [row.prompt()["prompt"] for row in rows] == lists
    assert len({row.identity({}) for row in rows}) == len(set(map(tuple, lists)))


def test_token_ids_of_tables_are_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of 1,000 ids is one array, not 1,000 objects."""
    import pyarrow.parquet as pq

    column = pa.array([[5, 1], [2]], pa.list_(pa.int32()))
    pq.write_table(
        pa.table({"input_ids": column, "loss_mask": column, "embedding": column}),
        tmp_path / "d.parquet",
    )
    monkeypatch.setattr("vllm_ascend_hsx.generate.open_dataset._without_nones", None)
    assert list(opened(tmp_path / "d.parquet").rows()) == [
        Row(0, array("q", [5, 1])),
        Row(1, array("q", [2])),
    ]


def test_check_counts_rows_tokens_characters_and_unsent_columns(tmp_path: Path) -> None:
    records: list[Any] = [
        *TOKENS,
        {"prompt": "abc", "score": 1},
        {"prompt": ""},
        {"prompt": "d", "score": 2, "lang": None},
    ]
    path = write_jsonl(tmp_path / "d.jsonl", records)
    found = checked(path)
    rows = [
        read_row(index, record, Options("", Path()), Counter())
        if record.get("prompt") != ""
        else None
        for index, record in enumerate(records)
    ]
    assert [f"{each:016x}" for each in found.identities] == [
        row.identity({})[:16] if row else "0" * 16 for row in rows
    ]
    assert found.bad == [
        BadRow(
            4,
            f"{path}:5",
            "prompt is empty; remove this row",
        )
    ]
    assert (found.unsent, found.tokens, found.characters) == (Counter(score=2), 304, 4)
    assert [row.index for row in opened(path).rows()] == [0, 1, 2, 3, 5]


@pytest.mark.parametrize("form", ["lines", "list", "parquet"])
def test_rows_beyond_a_limit_are_not_checked(form: str, tmp_path: Path) -> None:
    records = [{"prompt": "a"}, {"prompt": ""}, {"prompt": "c"}, {"prompt": ""}]
    path = {
        "lines": tmp_path / "d.jsonl",
        "list": tmp_path / "d.json",
        "parquet": tmp_path / "d.parquet",
    }[form]
    if form == "lines":
        write_jsonl(path, records)
    elif form == "list":
        path.write_text(json.dumps(records))
    else:
        datasets.Dataset.from_list(records).to_parquet(path)
    found = checked(path, limit=3)
    assert len(found.identities) == 3
    assert [each.index for each in found.bad] == [1]
    assert [row.index for row in opened(path, limit=3).rows()] == [0, 2]


def test_unknown_columns_of_tables_are_counted_but_not_read(tmp_path: Path) -> None:
    odd = pa.array([2**55, None], pa.timestamp("ms"))  # a time that Python cannot represent
    table = pa.table({"prompt": ["a", "b"], "made": odd})
    assert checked(_parquet(tmp_path / "d.parquet", table)).unsent == Counter(made=1)
    assert bad(tmp_path / "d.parquet", column="made")[0].startswith(
        f"{tmp_path}/d.parquet, row 0: "
    )


def _parquet(path: Path, table: Any) -> Path:
    import pyarrow.parquet as pq

    pq.write_table(table, path)
    return path


def test_blank_lines_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "a"}\n\n  \n{"prompt": "b"}')
    assert [(row.index, row.content) for row in opened(path).rows()] == [(0, "a"), (1, "b")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a"', "the row is not JSON .*; give one JSON object per line"),
        (b'{"prompt": "\xff"}', "the row is not JSON"),
        (b"[" * 100_000, "the row is not JSON"),
        (b"5", "the row is 5; give one JSON object per line"),
        (
            b'{"other": "a", "id": 4}',
            (
                "it has none of token_ids, .*, only .*'other', 'id'.*; name the column to send "
                "with "
                "--column"
            ),
        ),
        (b'{"input_ids": [1, -4]}', r"input_ids\[1\] is -4; token ids are whole numbers"),
    ],
)
def test_bad_line_is_reported_by_number_and_other_rows_are_read(
    line: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "b"}\n' + line + b'\n{"prompt": "c"}\n')
    (said,) = bad(path)
    assert re.search(f"d.jsonl:3: {message}", said)
    assert [row.index for row in opened(path).rows()] == [0, 1, 3]


# Rows with a repeated key, and the key. The last value would be sent silently.
TWICE = [
    ('{"prompt": "a", "id": 1, "prompt": "b"}', "the row has the key 'prompt' twice"),
    ('{"prompt": "a", "score": 1, "score": 1}', "the row has the key 'score' twice"),
    (
        '{"messages": [{"role": "user", "content": "a", "role": "system"}]}',
        "the row has the key 'role' twice",
    ),
    (
        '{"prompt": "a", "meta": [[{"x": {"y": 1, "y": {"z": 1, "z": 2}}}]]}',
        "the row has the key '[yz]' twice",
    ),
    ('{"prompt": "a", "prompt": {"": 1, "": 2}}', "the row has the key '(prompt)?' twice"),
]


@pytest.mark.parametrize(
    "form", ["d.jsonl", "d.jsonl.gz", "d.jsonl.zst", "d.json", "d.json.gz", "d.json.zst"]
)
def test_repeated_key_is_reported_and_other_rows_are_read(form: str, tmp_path: Path) -> None:
    rows = [
        '{"prompt": "first"}',
        *(row for row, _ in TWICE),
        '{"prompt": "last", "meta": {"prompt": [{"prompt": 1}, {"prompt": 2}]}}',
    ]
    plain = tmp_path / form.removesuffix(".gz").removesuffix(".zst")
    plain.write_text("\n".join(rows) if plain.suffix == ".jsonl" else f"[{', '.join(rows)}]")
    packed(plain)
    found = bad(tmp_path / form)
    assert len(found) == len(TWICE)
    for number, (said, (_, problem)) in enumerate(zip(found, TWICE, strict=True), start=1):
        place = f":{number + 1}" if plain.suffix == ".jsonl" else f", row {number}"
        assert re.fullmatch(f"{tmp_path / form}{place}: {problem}; give each key once", said), said
    assert [row.content for row in opened(tmp_path / form).rows()] == ["first", "last"]


def test_repeated_key_in_json_of_a_cell_is_reported_with_the_column(tmp_path: Path) -> None:
    record = {"messages": '[{"role": "user", "content": "a", "content": "b"}]'}
    expected = [": messages has the key 'content' twice; give each key once"]
    made = [write_jsonl(tmp_path / "d.jsonl", [record]), write_csv(tmp_path / "d.csv", [record])]
    for path in (*made, _parquet(tmp_path / "d.parquet", pa.Table.from_pylist([record]))):
        assert [re.sub(r"^.*?(:\d|, row 0)", "", each) for each in bad(path)] == expected, path


@pytest.mark.parametrize("name", ["d.csv", "d.tsv"])
def test_repeated_column_of_csv_is_refused(name: str, tmp_path: Path) -> None:
    separator = {"d.csv": ",", "d.tsv": "\t"}[name]
    for header, problem in (
        (["prompt", "id", "prompt"], "'prompt'"),
        (["id", "", "", "prompt"], None),
    ):
        (tmp_path / name).write_text(
            "\n".join(separator.join(cells) for cells in (header, ["a"] * len(header)))
        )
        if problem is None:  # empty columns of a spreadsheet
            assert [row.content for row in opened(tmp_path / name).rows()] == ["a"]
        else:
            with pytest.raises(
                DatasetError,
                match=f"{name}: the header has the column {problem} twice; give each column once",
            ):
                checked(tmp_path / name)


def test_bad_row_of_list_table_or_csv_is_reported(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text('[{"prompt": "a"},\n 5,\n{"prompt": ""}]')
    assert [each.split(";")[0] for each in bad(tmp_path / "list.json")] == [
        f"{tmp_path}/list.json, row 1: the row is 5",
        f"{tmp_path}/list.json, row 2: prompt is empty",
    ]
    (tmp_path / "d.csv").write_text('prompt,tools\n"a\nb",\n,\nc,5\nd,,e\n')
    found = checked(tmp_path / "d.csv")
    assert [f"{each.where} {each.problem.split(';')[0]}" for each in found.bad] == [
        f"{tmp_path}/d.csv:4 prompt is empty",
        f"{tmp_path}/d.csv:5 tools cannot be sent with prompt: a list of tools, or of functions",
    ]
    assert found.unsent == {"cells beyond the header": 1}
    numbers = pa.array([[1], [2], [3, None]])
    table = pa.table(
        {"input_ids": numbers, "big": pa.array([[1], [2], [2**63]], pa.list_(pa.uint64()))}
    )
    path = save_to_disk(tmp_path / "saved", table)
    assert bad(path) == [
        (
            f"{path}, row 2: input_ids[1] is None; token ids are whole numbers from 0 to the "
            "vocabulary's size"
        )
    ]
    assert bad(path, column="big")[0].startswith(f"{path}, row 2: ")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "d.json",
            b'[{"prompt": "a"},\n {"prompt": "b"',
            "cannot be read after 1 rows: parse error: premature EOF",
        ),
        (
            "d.json",
            b'[{"prompt": "a"},\n {"prompt" "b"}]',
            "cannot be read after 1 rows: parse error: ",
        ),
        (
            "d.json",
            b'[{"prompt": "a"}] {"prompt": "b"}',
            "cannot be read after 1 rows: parse error: trailing garbage",
        ),
        (
            "d.json",
            b'{\n  "prompt": "a"\n}\n',
            (
                "the first row has several lines; write one JSON object per line, or one list of "
                "all objects"
            ),
        ),
        (
            "d.json.gz",
            gzip.compress(b'{"prompt": "a"}\n' * 9, mtime=0)[:-12],
            "cannot be read.*: Compressed file ended",
        ),
        (
            "d.json.zst",
            pa.Codec("zstd").compress(os.urandom(9000), asbytes=True)[:-12],
            "cannot be read.*: Truncated compressed stream",
        ),
        ("d.csv", b'prompt\n"a', "cannot be read after 0 rows: unexpected end of data"),
        ("d.csv", b"prompt\n\xff", "cannot be read after 0 rows: 'utf-8' codec can't decode"),
        (
            "d.arrow",
            b"this is no table of any kind",
            "cannot be read after 0 rows: Not an Arrow file",
        ),
        (
            "d.parquet",
            b"this is no table of any kind",
            "cannot be read after 0 rows: Parquet magic bytes not found in footer",
        ),
        ("blank.jsonl", b"\n\n", "the dataset has no rows"),
        ("empty.json", b"[]", "the dataset has no rows"),
    ],
)
def test_unreadable_file_gives_one_error(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=f"{name}: {message}") as refusal:
        checked(tmp_path / name)
    assert len(str(refusal.value).splitlines()) == 1


def test_repeated_column_of_a_table_is_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    with pytest.raises(
        DatasetError,
        match="d.parquet: cannot be read after 0 rows: Multiple matches for .*prompt",
    ):
        checked(_parquet(tmp_path / "d.parquet", table))


def test_cached_maps_of_datasets_are_not_read(tmp_path: Path) -> None:
    for name, prompt in (
        ("cache-0123456789abcdef.arrow", "mapped"),
        ("train-00000.arrow", "its own"),
    ):
        table = pa.table({"prompt": [prompt]})
        with (
            pa.OSFile(str(tmp_path / name), "wb") as file,
            pa.ipc.new_file(file, table.schema) as writer,
        ):
            writer.write_table(table)
    assert [row.content for row in opened(tmp_path).rows()] == ["its own"]


def test_error_for_an_invalid_dataset_lists_valid_forms(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.jsonl")
    (tmp_path / "data.xml").touch()
    (tmp_path / "empty").mkdir()
    cases = {
        "data.xml": (
            "give a file of one of these forms, or a folder with files of one of them: JSON .*, "
            ".parquet or .arrow"
        ),
        "fifo.jsonl": (
            "not a regular file, and the dataset is read twice; copy it to a file, or pass it as "
            "standard input with --data -"
        ),
        "empty": "cannot be read: The directory at .*empty doesn't contain any data files",
    }
    for name, message in cases.items():
        with pytest.raises(DatasetError, match=f"{name}: {message}"):
            opened(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", '{"_data_files": [{"filename": 5}]}'),
        ("state.json", '{"_data_files": [{"filename": "a\\u0000b"}]}'),
        ("state.json", "[" * 100_000),
        ("dataset_dict.json", '{"splits": []}'),
        ("dataset_dict.json", '{"splits": [["a"]]}'),
    ],
)
def test_invalid_arrow_data_is_reported(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(
        DatasetError, match=f"{tmp_path}: (cannot be read|the dataset has the splits ;)"
    ):
        opened(tmp_path)


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_arrow_file_truncated_while_reading_is_reported(tmp_path: Path, kind: str) -> None:
    path, table = (
        tmp_path / "d.arrow",
        pa.table({"prompt": [f"{row} " + "x" * 1000 for row in range(3000)]}),
    )
    with (
        pa.OSFile(str(path), "wb") as sink,
        getattr(pa.ipc, f"new_{kind}")(sink, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=10)
    rows = opened(path).rows()
    next(rows)
    os.truncate(path, 100)
    with pytest.raises(DatasetError, match="d.arrow"):
        list(rows)


def test_too_deeply_nested_message_is_reported(tmp_path: Path) -> None:
    """The decoder accepts deeper values than the encoder, because the encoder has less stack."""
    path = tmp_path / "d.jsonl"
    for depth in (970, 978, 980, 982, 984):
        path.write_text(
            '{"messages": [{"role": "user", "content": ' + "[" * depth + "]" * depth + "}]}"
        )
        assert bad(path)[0].startswith(f"{path}:1: ")


@pytest.mark.parametrize(
    ("module", "name", "content"),
    [
        ("datasets", "d.parquet", b""),
        ("datasets", "folder/x", b""),
        ("ijson", "d.json", b"[]"),
        ("pyarrow", "d.jsonl.zst", b"\x28\xb5\x2f\xfd"),
    ],
)
def test_missing_package_is_reported_with_install_command(
    module: str, name: str, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        DatasetError,
        match=rf"reading it needs {module}: pip install 'vllm-ascend-hsx\[data\]', or convert it to JSON lines",
    ):
        checked(tmp_path / Path(name).parts[0])


def test_plain_json_lines_and_csv_need_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("datasets", "pyarrow", "ijson"):
        monkeypatch.setitem(sys.modules, module, None)
    lines = write_jsonl(tmp_path / "d.jsonl", TEXTS)
    for path in (lines, packed_by_gzip(lines), write_csv(tmp_path / "d.csv", TEXTS)):
        assert [row.content for row in opened(path).rows()] == [each["prompt"] for each in TEXTS]


def packed_by_gzip(path: Path) -> Path:
    made = path.with_name(f"{path.name}.gz")
    made.write_bytes(gzip.compress(path.read_bytes()))
    return made


def test_no_rows_are_read_after_the_file_has_changed(tmp_path: Path) -> None:
    """A changed row would be sent with the index of a row that was checked."""
    path = write_jsonl(tmp_path / "d.jsonl", [{"token_ids": [number]} for number in range(3000)])
    dataset = opened(path)
    dataset.check({})
    rows = dataset.rows()
    given = [next(rows)]
    write_jsonl(path, [{"token_ids": [number]} for number in range(3000)][::-1])
    with pytest.raises(
        DatasetError,
        match=(
            "the file changed while it was read; restore the checked version, or run again when "
            "the file is complete"
        ),
    ):
        given += rows
    assert [list(row.token_ids or ()) for row in given] == [[0]]


@pytest.mark.parametrize(
    "write",
    [write_jsonl, lambda path, records: _parquet(path, pa.Table.from_pylist(records))],
    ids=["lines", "parquet"],
)
def test_file_changed_between_check_and_use_is_reported(
    write: Callable[[Path, list[dict[str, Any]]], Path], tmp_path: Path
) -> None:
    path = tmp_path / ("d.jsonl" if write is write_jsonl else "d.parquet")
    write(path, TOKENS)
    dataset = opened(path)
    dataset.check({})
    write(path, [*TOKENS, {"token_ids": [1]}])
    with pytest.raises(DatasetError, match="the file changed while it was read"):
        list(dataset.rows())


@pytest.mark.parametrize("form", ["lines", "list", "gz"])
def test_a_large_dataset_is_read_in_little_memory(form: str, tmp_path: Path) -> None:
    import tracemalloc

    line = json.dumps({"input_ids": list(range(1000))}) + "\n"
    path = tmp_path / ("d.jsonl.gz" if form == "gz" else "d.json")
    text = f"[{','.join([line] * 1000)}]" if form == "list" else line * 1000
    path.write_bytes(gzip.compress(text.encode(), 1) if form == "gz" else text.encode())
    del text
    dataset = opened(path)
    reports: list[int] = []
    tracemalloc.start()
    try:
        assert len(dataset.check({}, reports.append).identities) == 1000
        assert tracemalloc.get_traced_memory()[1] < 1_500_000  # of 5 MB
    finally:
        tracemalloc.stop()
    assert reports == [1000]
