"""Files are found by the response's id, for every prompt, sample and form of id."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_hsx import find
from vllm_ascend_hsx.protocol.names import file_name


def internal_id(
    response_id: str, prompt: int = 0, sample: int | None = None, digits: str | None = "0123abcd"
) -> str:
    """vLLM's id of one prompt and sample."""
    number = f"-{prompt}" if response_id.startswith(("cmpl-", "generative-scoring-")) else ""
    return "".join(
        [
            "" if sample is None else f"{sample}_",
            response_id,
            number,
            f"-{digits}" if digits else "",
        ]
    )


def numbered_id(response_id: str, number: int) -> str:
    """vLLM's id of a turn of /v1/responses, or of a conversation of a batch of chats."""
    return f"{response_id}_{number}-0123abcd"


def put(directory: Path, *ids: str, suffix: str = "") -> list[Path]:
    paths = [directory / (file_name(request_id) + suffix) for request_id in ids]
    for path in paths:
        path.touch()
    return paths


@pytest.mark.parametrize(
    "response_id",
    ["cmpl-5f3a", "generative-scoring-x", "cmpl-a/b/../../c", "cmpl-a-0", "cmpl-é" * 9, "cmpl-0a1"],
)
def test_each_prompt_and_sample_of_a_response_is_found(tmp_path: Path, response_id: str) -> None:
    many = {
        (p, s): put(tmp_path, internal_id(response_id, p, s, f"{p:x}{s}abcdef"))[0]
        for p in range(12)
        for s in range(3)
    }
    put(
        tmp_path,
        internal_id(response_id + "0", 1, 1),
        internal_id("x" + response_id, 1, 1),
        ".hidden.safetensors",
        "unrelated",
    )
    assert {(p, s): find(tmp_path, response_id, prompt=p, sample=s) for p, s in many} == many


@pytest.mark.parametrize(
    "digits", ["0123abcd", None], ids=["random", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"]
)
@pytest.mark.parametrize("sample", [None, 0], ids=["n=1", "n>1"])
@pytest.mark.parametrize("response_id", ["cmpl-a", "chatcmpl-a", "generate-tokens-a", "id"])
@pytest.mark.parametrize("suffix", ["", ".lock", ".error"])
def test_file_is_found_in_every_state(
    tmp_path: Path, response_id: str, sample: int | None, digits: str | None, suffix: str
) -> None:
    (path,) = put(tmp_path, internal_id(response_id, 0, sample, digits), suffix=suffix)
    assert find(str(tmp_path), response_id) == path.with_name(path.name.removesuffix(suffix))


@pytest.mark.parametrize(
    ("response_id", "others"),
    [
        ("cmpl-job-0", "cmpl-job-0-0123abcd"),  # X-Request-Id: job
        ("cmpl-job-0", "cmpl-job-0-84587174"),
        ("generative-scoring-job-0", "generative-scoring-job-0-0123abcd"),
        ("job_0", "job_0-0123abcd"),  # request_id of /v1/responses: job
        ("job", "0_job_0-0123abcd"),
        ("chatcmpl-job", "chatcmpl-job-0-0123abcd"),
    ],
)
def test_file_of_an_id_that_differs_by_a_number_is_not_found(
    tmp_path: Path, response_id: str, others: str
) -> None:
    put(tmp_path, others)
    with pytest.raises(FileNotFoundError):
        find(tmp_path, response_id)


@pytest.mark.parametrize("response_id", ["resp_5f3a", "chatcmpl-x", "re/../sp", "resp_1_2"])
def test_each_turn_of_a_response_and_each_conversation_of_a_batch_is_found(
    tmp_path: Path, response_id: str
) -> None:
    turns = {number: put(tmp_path, numbered_id(response_id, number))[0] for number in range(12)}
    put(tmp_path, numbered_id(response_id + "0", 1), numbered_id("x" + response_id, 1))
    assert {number: find(tmp_path, response_id, prompt=number) for number in turns} == turns


def test_numbered_client_id_is_not_mistaken_for_a_turn(
    tmp_path: Path,
) -> None:
    first, second = put(tmp_path, "chatcmpl-row-0123abcd", "chatcmpl-row_0-0123abcd")
    assert (find(tmp_path, "chatcmpl-row"), find(tmp_path, "chatcmpl-row_0")) == (first, second)


@given(name=st.text(max_size=120), prompt=st.integers(0, 99), sample=st.none() | st.integers(0, 9))
def test_any_id_is_found(
    tmp_path_factory: pytest.TempPathFactory, name: str, prompt: int, sample: int | None
) -> None:
    response_id = f"cmpl-{name}"
    directory = tmp_path_factory.mktemp("files")
    (path,) = put(directory, internal_id(response_id, prompt, sample))
    assert find(directory, response_id, prompt=prompt, sample=sample or 0) == path


def test_two_requests_of_one_id_are_reported(
    tmp_path: Path,
) -> None:
    (path,) = put(tmp_path, internal_id("cmpl-id", 0))
    put(tmp_path, internal_id("cmpl-id", 0), suffix=".lock")
    assert find(tmp_path, "cmpl-id") == path
    put(tmp_path, internal_id("cmpl-id", 0, digits="ffffffff"))
    with pytest.raises(LookupError, match="its own id"):
        find(tmp_path, "cmpl-id")


@pytest.mark.parametrize(("prompt", "sample"), [(1, 0), (0, 1), (3, 3)])
def test_missing_response_is_named(tmp_path: Path, prompt: int, sample: int) -> None:
    put(tmp_path, internal_id("cmpl-id", 0, 0))
    with pytest.raises(FileNotFoundError, match=f"prompt {prompt}, sample {sample} of 'cmpl-id'"):
        find(tmp_path, "cmpl-id", prompt=prompt, sample=sample)


@pytest.mark.parametrize(
    "name",
    ["x" * 200, "x" * 400, "é" * 180, "x" * 100_000],
    ids=lambda name: f"{name[0]} {len(name)} times",
)
def test_id_with_a_hashed_file_name_is_explained(tmp_path: Path, name: str) -> None:
    response_id = f"cmpl-{name}"
    put(tmp_path, internal_id(response_id))
    problem = rf"of 'cmpl-{name[:95]}'\.\.\., an id of {len(response_id)} characters: .* use kv_transfer_params of the response"
    with pytest.raises(FileNotFoundError, match=problem):
        find(tmp_path, response_id)


def test_long_id_with_a_plain_file_name_is_found(tmp_path: Path) -> None:
    response_id = "cmpl-" + "x" * 180
    with pytest.raises(FileNotFoundError) as caught:
        find(tmp_path, response_id)
    assert "hash" not in str(caught.value)
    (path,) = put(tmp_path, internal_id(response_id))
    assert find(tmp_path, response_id) == path
