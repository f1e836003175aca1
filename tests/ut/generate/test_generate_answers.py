"""Answers of the target are stored beside the rows, and written as a dataset to train on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from generate_bench import Bench
from generate_files import stored_ids
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_hsx.generate import answers
from vllm_ascend_hsx.generate.answers import Answers
from vllm_ascend_hsx.generate.client import Answer
from vllm_ascend_hsx.generate.ledger import Division
from vllm_ascend_hsx.reader.check import Expected

SAMPLED = ("--include-output", "--max-tokens", 4, "--temperature", 0.7, "--top-p", 0.9, "--top-k", 20, "--seed", 5)
RECORDS = [{"token_ids": [3, 4]}, {"prompt": "ab"}, {"messages": [{"role": "user", "content": "c"}]}]
TEXT = "<7><8><9><10>"


def answers_of(output: Path) -> dict[int, dict[str, Any]]:
    """The last whole line of each row."""
    texts = [line for path in sorted(output.glob("answers*.jsonl")) for line in path.read_text().splitlines() if line.endswith("}")]
    lines = map(json.loads, texts)
    return {line["row"]: line for line in lines}


def test_text_ids_finish_reason_and_mask_lie_beside_the_rows(bench: Bench) -> None:
    code, printed = bench.run(*SAMPLED, records=RECORDS)
    assert code == 0, printed
    for row, line in answers_of(bench.output).items():
        prompt = bench.server.seen[[seen.row for seen in bench.server.seen].index(row)].token_ids
        assert line["token_ids"] == [*prompt, 7, 8, 9] == stored_ids(bench.output / f"hs_{row}.safetensors")
        assert (line["prompt_tokens"], line["output_token_ids"], line["text"]) == (len(prompt), [7, 8, 9, 10], TEXT)
        assert line["finish_reason"] == "length"
    trained = datasets.load_from_disk(bench.output / "training_data")
    for row in range(3):
        ids = torch.tensor(answers_of(bench.output)[row]["token_ids"])
        assert torch.equal(trained[row]["input_ids"], ids) and trained[row]["seq_len"] == len(ids)
        assert trained[row]["loss_mask"].tolist() == [0] * (len(ids) - 3) + [1, 1, 1]
        assert (trained[row]["text"], trained[row]["finish_reason"]) == (TEXT, "length")


def test_sampling_options_are_sent_and_each_row_has_its_own_seed(bench: Bench) -> None:
    assert bench.run(*SAMPLED, records=RECORDS)[0] == 0
    bodies = [seen.body for seen in bench.server.seen]
    assert all((each["temperature"], each["top_p"], each["top_k"], each["max_tokens"]) == (0.7, 0.9, 20, 4) for each in bodies)
    assert len({each["seed"] for each in bodies}) == 3
    first = {seen.row: seen.body["seed"] for seen in bench.server.seen}
    bench.server.seen.clear()
    assert bench.run(*SAMPLED, "--output", bench.output / "again", records=RECORDS)[0] == 0
    assert {seen.row: seen.body["seed"] for seen in bench.server.seen} == first


def test_rows_with_an_answer_are_not_asked_for_again_and_rows_without_one_are(bench: Bench) -> None:
    assert bench.run(*SAMPLED, records=RECORDS)[0] == 0
    path = bench.output / "answers.jsonl"
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.strip()]
    (lost,) = [line for line in lines if '"row":1,' in line]
    path.write_text("".join(line for line in lines if line != lost) + lost[:-30])  # as where a run was killed
    code, printed = bench.run(*SAMPLED, records=RECORDS)
    assert code == 0, printed
    assert bench.server.asked == Counter({0: 1, 1: 2, 2: 1})
    assert set(answers_of(bench.output)) == {0, 1, 2}


def test_a_row_without_an_answer_keeps_its_place_in_the_dataset(bench: Bench) -> None:
    bench.server.behave = lambda seen: 400 if seen.row == 1 else "ok"
    assert bench.run(*SAMPLED, records=RECORDS)[0] == 1
    trained = datasets.load_from_disk(bench.output / "training_data")
    assert [row["input_ids"].tolist() for row in trained][:2] == [[3, 4, 7, 8, 9], [0]] and len(trained) == 3
    assert trained[1]["loss_mask"].tolist() == [0]


def test_a_changed_row_has_the_new_answer_in_the_dataset(bench: Bench) -> None:
    assert bench.run(*SAMPLED, records=RECORDS)[0] == 0
    code, printed = bench.run(*SAMPLED, records=[RECORDS[0], {"prompt": "other"}, RECORDS[2]])
    assert code == 0 and bench.server.asked == Counter({0: 1, 1: 2, 2: 1}), printed
    trained = datasets.load_from_disk(bench.output / "training_data")
    assert bytes(trained[1]["input_ids"].tolist()[:5]) == b"other"


def test_ranks_have_files_of_their_own_and_one_rank_writes_the_dataset(bench: Bench) -> None:
    records = [{"token_ids": [row + 1]} for row in range(20)]
    for rank in (0, 1):
        code, printed = bench.run(*SAMPLED, "--world-size", 2, "--rank", rank, records=records)
        assert code == 0 and "training_data is not written: when all ranks have ended, call again" in printed, printed
    assert sorted(path.name for path in bench.output.glob("answers*")) == ["answers-0-of-2.jsonl", "answers-1-of-2.jsonl"]
    assert bench.run(*SAMPLED, records=records)[0] == 0
    assert bench.server.asked == Counter(range(20))
    assert len(datasets.load_from_disk(bench.output / "training_data")) == 20


def test_without_datasets_the_answers_stay_and_the_extra_is_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    code, printed = bench.run(*SAMPLED, records=RECORDS)
    assert code == 0 and "training_data is not written: it needs datasets: pip install 'vllm-ascend-hsx[data]'" in printed, printed
    assert set(answers_of(bench.output)) == {0, 1, 2}


def test_options_of_answers_are_refused_without_answers(bench: Bench) -> None:
    for option in (("--max-tokens", 3), ("--seed", 3), ("--temperature", 0.5)):
        code, printed = bench.run(*option)
        assert code == 2 and f"{option[0]}" in printed and "add --include-output or leave it out" in printed, printed


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=12), st.integers(0, 10**6))
def test_answers_before_a_cut_are_known(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int]], cut: int) -> None:
    output = tmp_path_factory.mktemp("answers")
    stored = Answers(output, Division())
    ends = []
    for row, content in rows:
        stored.append(row, f"{content + 1:032x}"[::-1], Answer(Expected([1, 2], [3]), 0, "text", [3, 4], "stop"))
        ends.append(stored._path.stat().st_size)
    stored.close()
    data = stored._path.read_bytes()
    stored._path.write_bytes(data[: cut % (len(data) + 1)])
    known = {row: content for (row, content), end in zip(rows, ends, strict=True) if end - 1 <= cut % (len(data) + 1)}
    again = Answers(output, Division())
    for row in range(10):
        for content in range(4):
            assert again.has(row, f"{content + 1:032x}"[::-1]) == (known.get(row) == content)
    again.close()


def test_the_dataset_is_the_one_that_speculators_reads() -> None:
    """The keys that train/data.py of speculators 0.9.0 uses."""
    assert set(answers._NO_ANSWER) >= {"input_ids", "loss_mask", "seq_len"}
