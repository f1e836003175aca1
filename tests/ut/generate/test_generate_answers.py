"""Answers of the target are stored beside the rows and written as a training dataset."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from documents import blocks
from generate_bench import Bench
from generate_files import HIDDEN, LAYER_IDS, Exchange, Seen, stored_ids
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_hsx.generate import answers
from vllm_ascend_hsx.generate.answers import Answers
from vllm_ascend_hsx.generate.client import Answer
from vllm_ascend_hsx.reader.check import Expected

SAMPLED = (
    "--include-output",
    "--max-tokens",
    4,
    "--temperature",
    0.7,
    "--top-p",
    0.9,
    "--top-k",
    20,
    "--seed",
    5,
)
RECORDS = [
    {"token_ids": [3, 4]},
    {"prompt": "ab"},
    {"messages": [{"role": "user", "content": "c"}]},
]
TEXT = "<7><8><9><10>"


def answers_of(output: Path) -> dict[int, dict[str, Any]]:
    """Return the last complete line of each row."""
    texts = [
        line
        for path in sorted(output.glob("answers*.jsonl"))
        for line in path.read_text().splitlines()
        if line.endswith("}")
    ]
    lines = map(json.loads, texts)
    return {line["row"]: line for line in lines}


def test_answers_and_loss_masks_are_stored_beside_the_rows(bench: Bench) -> None:
    code, printed = bench.run(*SAMPLED, records=RECORDS)
    assert code == 0, printed
    for row, line in answers_of(bench.output).items():
        prompt = bench.server.seen[[seen.row for seen in bench.server.seen].index(row)].token_ids
        assert (
            line["token_ids"]
            == [*prompt, 7, 8, 9]
            == stored_ids(bench.output / f"hs_{row}.safetensors")
        )
        assert (line["prompt_tokens"], line["output_token_ids"], line["text"]) == (
            len(prompt),
            [7, 8, 9, 10],
            TEXT,
        )
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
    assert all(
        (each["temperature"], each["top_p"], each["top_k"], each["max_tokens"]) == (0.7, 0.9, 20, 4)
        for each in bodies
    )
    assert len({each["seed"] for each in bodies}) == 3
    first = {seen.row: seen.body["seed"] for seen in bench.server.seen}
    bench.server.seen.clear()
    assert bench.run(*SAMPLED, "--output", bench.output / "again", records=RECORDS)[0] == 0
    assert {seen.row: seen.body["seed"] for seen in bench.server.seen} == first


def test_only_rows_without_an_answer_are_requested_again(bench: Bench) -> None:
    assert bench.run(*SAMPLED, records=RECORDS)[0] == 0
    path = bench.output / "answers.jsonl"
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.strip()]
    (lost,) = [line for line in lines if '"row":1,' in line]
    path.write_text(
        "".join(line for line in lines if line != lost) + lost[:-30]
    )  # as after a killed run
    code, printed = bench.run(*SAMPLED, records=RECORDS)
    assert code == 0, printed
    assert bench.server.asked == Counter({0: 1, 1: 2, 2: 1})
    assert set(answers_of(bench.output)) == {0, 1, 2}


def test_row_without_an_answer_keeps_its_index_in_the_dataset(bench: Bench) -> None:
    bench.server.behave = lambda seen: 400 if seen.row == 1 else "ok"
    assert bench.run(*SAMPLED, records=RECORDS)[0] == 1
    trained = datasets.load_from_disk(bench.output / "training_data")
    assert [row["input_ids"].tolist() for row in trained][:2] == [[3, 4, 7, 8, 9], [0]] and len(
        trained
    ) == 3
    assert trained[1]["loss_mask"].tolist() == [0]


def test_a_changed_row_has_the_new_answer_in_the_dataset(bench: Bench) -> None:
    assert bench.run(*SAMPLED, records=RECORDS)[0] == 0
    code, printed = bench.run(*SAMPLED, records=[RECORDS[0], {"prompt": "other"}, RECORDS[2]])
    assert code == 0 and bench.server.asked == Counter({0: 1, 1: 2, 2: 1}), printed
    trained = datasets.load_from_disk(bench.output / "training_data")
    assert bytes(trained[1]["input_ids"].tolist()[:5]) == b"other"


def test_each_rank_has_an_answers_file_and_a_run_of_one_rank_writes_the_dataset(
    bench: Bench,
) -> None:
    records = [{"token_ids": [row + 1]} for row in range(20)]
    for rank in (0, 1):
        code, printed = bench.run(*SAMPLED, "--world-size", 2, "--rank", rank, records=records)
        assert (
            code == 0
            and "training_data was not written: after all ranks have ended, run again" in printed
        ), printed
    assert sorted(path.name for path in bench.output.glob("answers*")) == [
        "answers-0-of-2.jsonl",
        "answers-1-of-2.jsonl",
    ]
    assert bench.run(*SAMPLED, records=records)[0] == 0
    assert bench.server.asked == Counter(range(20))
    assert len(datasets.load_from_disk(bench.output / "training_data")) == 20


def the_dataset_is_of_the_files(bench: Bench, rows: int = 3) -> None:
    trained = datasets.load_from_disk(bench.output / "training_data")
    assert [each["input_ids"].tolist() for each in trained] == [
        stored_ids(bench.output / f"hs_{row}.safetensors") for row in range(rows)
    ]


def test_row_with_a_lost_answer_is_requested_again(bench: Bench) -> None:
    """The row has a file, but the text is unknown."""
    bench.server.behave = lambda seen: "drop_complete" if (seen.row, seen.time) == (1, 1) else "ok"
    code, printed = bench.run(*SAMPLED, records=RECORDS)
    assert code == 0 and bench.server.asked == Counter({0: 1, 1: 2, 2: 1}), printed
    assert set(answers_of(bench.output)) == {0, 1, 2}
    the_dataset_is_of_the_files(bench)


def test_answer_of_an_earlier_request_is_not_used_for_a_later_file(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run was killed after a row was sampled again, and before the new answer was stored."""
    assert bench.run(*SAMPLED, records=RECORDS)[0] == 0
    path = bench.output / "answers.jsonl"
    first = path.read_bytes()
    (bench.output / "hs_1.safetensors").unlink()
    with monkeypatch.context() as other:
        other.setattr(Seen, "output", [5, 5, 5, 5])
        assert bench.run(*SAMPLED, records=RECORDS)[0] == 0
    path.write_bytes(first)
    code, printed = bench.run(*SAMPLED, records=RECORDS)
    assert (
        code == 0
        and "hs_1.safetensors: the answer is not stored; requesting the row again" in printed
    ), printed
    assert bench.server.asked == Counter({0: 1, 1: 3, 2: 1})
    the_dataset_is_of_the_files(bench)


def test_rows_that_moved_in_the_dataset_keep_their_answers(bench: Bench) -> None:
    assert bench.run(*SAMPLED, records=RECORDS)[0] == 0
    before = answers_of(bench.output)
    for _ in range(2):
        assert bench.run(*SAMPLED, records=RECORDS[1:])[0] == 0
        assert bench.server.asked == Counter(range(3))
        assert [answers_of(bench.output)[row] for row in range(2)] == [
            before[row + 1] | {"row": row} for row in range(2)
        ]
        the_dataset_is_of_the_files(bench, rows=2)
    assert len((bench.output / "answers.jsonl").read_text().split()) == 5, (
        "each is stored again once"
    )


def test_answer_with_the_request_id_of_the_file_is_used(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier answer is in the file that is read last."""
    assert bench.run(*SAMPLED, records=RECORDS)[0] == 0
    (bench.output / "hs_1.safetensors").unlink()
    with monkeypatch.context() as other:
        other.setattr(Seen, "output", [5, 5, 5, 5])
        assert bench.run(*SAMPLED, "--world-size", 2, "--rank", 0, records=RECORDS)[0] == 0
    assert bench.run(*SAMPLED, records=RECORDS)[0] == 0
    assert bench.server.asked == Counter({0: 1, 1: 2, 2: 1})
    the_dataset_is_of_the_files(bench)


def test_dataset_of_the_same_answers_keeps_files_of_the_trainer(
    bench: Bench,
) -> None:
    vocabulary = bench.output / "training_data" / "d2t-8.npy"
    for records, is_kept in (
        (RECORDS, False),
        (RECORDS, True),
        (RECORDS[:2], False),
        ([*RECORDS[:2], {"prompt": "d"}], False),
    ):
        assert bench.run(*SAMPLED, records=records)[0] == 0
        assert vocabulary.exists() == is_kept
        the_dataset_is_of_the_files(bench, rows=len(records))
        vocabulary.touch()


def test_documented_command_counts_tokens_with_a_loss(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.run(*SAMPLED, records=RECORDS)[0] == 0
    (text,) = blocks("generate.md", "token-frequencies")
    program, option, code, path = shlex.split(text)
    assert (program, option) == ("python", "-c")
    path = path.replace("/data/hidden_states", str(bench.output))
    monkeypatch.setattr("sys.argv", ["-c", path])
    exec(code, {})
    assert torch.load(f"{path}/token_freq.pt") == {7: 3, 8: 3, 9: 3}


def test_speculators_trains_on_all_rows_with_an_answer(bench: Bench) -> None:
    """Read the dataset with the unmodified loader of speculators."""
    from hs_connectors.transfer import FileTransfer
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.dataloader import create_train_val_loaders

    bench.server.behave = lambda seen: 400 if seen.row % 3 == 0 else "ok"
    records = [{"token_ids": [row + 1, 50]} for row in range(24)]
    assert bench.run(*SAMPLED, "--allow-failures", 8, records=records)[0] == 0
    loaders = create_train_val_loaders(
        data_path=str(bench.output / "training_data"),
        total_seq_len=12,
        hidden_states_dtype=torch.bfloat16,
        transfer=FileTransfer(bench.output),
        vllm_endpoint="",
        on_missing="skip",
        verifier_name_or_path="",
        request_timeout=1,
        max_retries=0,
        generation_validation_retries=0,
        max_consecutive_generation_failures=1,
        hidden_size=HIDDEN,
        num_target_layers=len(LAYER_IDS) - 1,
        num_workers=0,
        prefetch_factor=1,
        preprocess=shift_batch,
        train_data_ratio=0.5,
    )
    seen = []
    for batch in (batch for loader in loaders for batch in loader):
        for document in range(int(batch["document_ids"].max()) + 1):
            mine = batch["document_ids"][0] == document
            seen.append(
                (batch["input_ids"][0, mine].tolist(), batch["loss_mask"][0, mine].tolist())
            )
    # Without the first token, as in training.
    assert [ids for ids, _ in sorted(seen)] == [[50, 7, 8, 9]] * 16 and all(
        mask == [0, 1, 1, 1] for _, mask in seen
    )


@pytest.mark.parametrize(
    ("place", "error", "reason"),
    [
        (
            "datasets.arrow_writer.ArrowWriter.finalize",
            OSError(28, "No space left on device"),
            "No space left on device",
        ),
        (
            "datasets.Dataset.save_to_disk",
            OSError(28, "No space left on device"),
            "No space left on device",
        ),
    ],
)
def test_unwritable_dataset_does_not_fail_the_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, place: str, error: OSError, reason: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(place, fail)
    code, printed = bench.run(*SAMPLED, records=RECORDS)
    assert (
        code == 0
        and "training_data was not written: " in printed
        and f"{reason}; fix it and run again" in printed
    ), printed
    assert not list(bench.output.glob("*training_data*")) and set(answers_of(bench.output)) == {
        0,
        1,
        2,
    }


def test_leftovers_of_a_killed_run_are_removed_with_the_next_dataset(bench: Bench) -> None:
    leftover = bench.output / ".training_data" / "new" / "data.arrow"
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    assert bench.run(*SAMPLED, records=RECORDS)[0] == 0
    assert not leftover.parent.parent.exists()
    the_dataset_is_of_the_files(bench)


def test_lone_surrogates_in_texts_are_replaced(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = bench.server.answer

    async def half_a_character(exchange: Exchange, path: str | None, **changes: Any) -> None:
        choice = {
            "token_ids": exchange.seen.output,
            "text": "a\ud83d",
            "prompt_token_ids": exchange.seen.token_ids,
        }
        await answer(exchange, path, choices=[choice], **changes)

    monkeypatch.setattr(bench.server, "answer", half_a_character)
    code, printed = bench.run(*SAMPLED, records=RECORDS[:2])
    assert code == 0, printed
    assert datasets.load_from_disk(bench.output / "training_data")[0]["text"] == "a?"


def test_the_dataset_is_written_where_torch_is_not_installed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.delitem(datasets.formatting._FORMAT_TYPES, "torch")
        without.setitem(
            datasets.formatting._FORMAT_TYPES_ALIASES_UNAVAILABLE,
            "torch",
            ValueError("PyTorch needs to be installed"),
        )
        assert bench.run(*SAMPLED, records=RECORDS)[0] == 0
    the_dataset_is_of_the_files(bench)


def test_without_datasets_answers_are_kept_and_the_extra_is_named(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    code, printed = bench.run(*SAMPLED, records=RECORDS)
    assert (
        code == 0
        and "training_data was not written: datasets is not installed; pip install 'vllm-ascend-hsx[data]'"
        in printed
    ), printed
    assert set(answers_of(bench.output)) == {0, 1, 2}


def test_answer_options_are_refused_without_include_output(bench: Bench) -> None:
    for option in (("--max-tokens", 3), ("--seed", 3), ("--temperature", 0.5)):
        code, printed = bench.run(*option)
        assert (
            code == 2
            and f"{option[0]}" in printed
            and "add --include-output or leave it out" in printed
        ), printed


def request_of(row: int, content: int) -> str:
    return f"{content:032x}-{row:012x}"


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=12),
    st.integers(0, 10**6),
)
def test_answers_before_a_truncation_are_found(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int]], cut: int
) -> None:
    output = tmp_path_factory.mktemp("answers")
    stored = Answers(output)
    ends = []
    for row, content in rows:
        stored.append(
            row,
            Answer(Expected([1, 2], [3]), 0, "a } text", [3, 4], "stop", request_of(row, content)),
        )
        ends.append(stored._path.stat().st_size)
    stored.close()
    data = stored._path.read_bytes()
    stored._path.write_bytes(data[: cut % (len(data) + 1)])
    known = {each for each, end in zip(rows, ends, strict=True) if end - 1 <= cut % (len(data) + 1)}
    again = Answers(output)
    for row in range(10):
        for content in range(4):
            assert again.has(row, request_of(row, content)) == ((row, content) in known)
    again.close()


def test_dataset_has_the_form_that_speculators_reads() -> None:
    """Check the keys that train/data.py of speculators 0.9.0 uses."""
    assert set(answers._NO_ANSWER) >= {"input_ids", "loss_mask", "seq_len"}
