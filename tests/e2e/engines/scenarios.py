"""Scenarios: requests to a stage's engine, one after the other (test_scenarios.py)."""

from __future__ import annotations

from collections.abc import Sequence

from harness import tokens
from session import Request
from stage import Stage

CHUNK = 64
BLOCK = 128  # tokens in a KV block of vllm-ascend
OTHER_LAYER_IDS = (0, 3)

# Chunked prefill and batches


def prompts_around_the_chunk(stage: Stage) -> None:
    for length in (1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK):
        stage.add(tokens(length), name=f"prompt-of-{length}")


def prompts_one_after_the_other(stage: Stage) -> None:
    for length in (1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK):
        stage.add(tokens(length, seed=1), name=f"alone-{length}")
        stage.drain()


def decodes_beside_new_prefills(stage: Stage) -> None:
    decoding = [
        stage.add(tokens(10 + index), name=f"decoding-{index}", max_tokens=24) for index in range(2)
    ]
    stage.until_mid_decode(decoding[1])
    # A full ring would hold the new requests back.
    stage.catch_up()
    stage.step()
    new = [
        stage.add(tokens(17), name="beside-decodes", max_tokens=2),
        stage.add(tokens(1), name="one-token", max_tokens=2),
    ]
    before = [stage.progress(each)["computed"] for each in decoding]
    stage.until(lambda: stage.progress(new[1]).get("computed", 0) > 0)
    assert all(
        stage.progress(each)["computed"] > computed
        for each, computed in zip(decoding, before, strict=True)
    )
    chunked = stage.add(tokens(3 * CHUNK + 9), name="chunked-beside-decodes")
    stage.until_mid_prefill(chunked)
    assert not any(each.finished for each in decoding)


def many_short_prompts_in_one_step(stage: Stage) -> None:
    short = [
        stage.add(tokens(1 + index % 6, seed=index), name=f"short-{index}", max_tokens=2)
        for index in range(14)
    ]
    stage.until(lambda: stage.progress(short[0]).get("computed", 0) > 0)
    assert all(stage.progress(each)["computed"] for each in short)


def a_prompt_of_the_greatest_length(stage: Stage) -> None:
    stage.add(tokens(511), name="longest")


# Preemption


def phases(stage: Stage, since: int) -> set[tuple[str, str]]:
    return {(each["id"], each["phase"]) for each in stage.session.preemptions[since:]}


def preempt_a_prefill(stage: Stage, beginning: Sequence[int] = ()) -> Request:
    """A decode grows into a third block beside a prompt of four: one too many."""
    before = len(stage.session.preemptions)
    new = 100 + len(stage.session.requests)  # a seed: these prompts have no rows yet
    growing = stage.add(tokens(2 * BLOCK - 6, seed=new), name="growing", max_tokens=60)
    stage.until_mid_decode(growing)
    victim = stage.add(
        [*beginning, *tokens(4 * BLOCK - 15 - len(beginning), seed=new)], name="victim"
    )
    stage.until(lambda: (victim.id, "prefill") in phases(stage, before))
    assert stage.progress(victim)["status"] == "PREEMPTED"
    return victim


def preempted_while_its_prompt_is_computed(stage: Stage) -> None:
    preempt_a_prefill(stage)


def preempted_while_they_decode(stage: Stage, generated: int = 24, more: int = 4) -> None:
    """Without and with rows of generated tokens; these are computed again as a prompt.

    Args:
        generated: tokens of the first of five requests; each generates `more` than the previous
            one.
    """
    for expect in ("prompt", "output"):
        before = len(stage.session.preemptions)
        lengths = [(BLOCK - 12 + index, generated + more * index) for index in range(5)]
        added = [
            stage.add(tokens(n), name=f"{expect}-{n}", expect=expect, max_tokens=count)
            for n, count in lengths
        ]
        stage.drain()
        assert any(phase == "decode" for _, phase in phases(stage, before))
        assert [len(each.tokens) for each in added] == [count for _, count in lengths]


def everything_is_preempted_at_once(stage: Stage) -> None:
    before = len(stage.session.preemptions)
    decoding = stage.add(
        tokens(30), name="decoding", expect="output", max_tokens=20, temperature=1.0, seed=3
    )
    stage.until_mid_decode(decoding)
    prefilling = stage.add(tokens(4 * CHUNK), name="prefilling", expect="output", max_tokens=3)
    stage.until_mid_prefill(prefilling)
    assert stage.session.call("reset_prefix_cache", reset_running_requests=True)
    assert phases(stage, before) == {(decoding.id, "decode"), (prefilling.id, "prefill")}


def aborted_after_it_was_preempted(stage: Stage) -> None:
    stage.abort(preempt_a_prefill(stage))


# Aborts


def aborted_before_it_is_scheduled(stage: Stage) -> None:
    stage.add(tokens(5 * CHUNK), name="busy")
    stage.step()
    aborted = stage.add(tokens(20), name="never-scheduled")
    assert stage.progress(aborted)["computed"] == 0
    stage.abort(aborted)
    stage.add(tokens(20), name="the-same-prompt")


def aborted_while_its_prompt_is_computed(stage: Stage) -> None:
    aborted = stage.add(tokens(5 * CHUNK, seed=2), name="aborted")
    stage.until_mid_prefill(aborted)
    stage.add(tokens(5 * CHUNK, seed=3), name="beside")
    stage.abort(aborted)
    stage.add(tokens(33), name="afterwards")


def aborted_while_it_decodes(stage: Stage) -> None:
    aborted = stage.add(tokens(40), name="prompt-only", max_tokens=50)
    with_output = stage.add(tokens(41), name="with-output", max_tokens=50, expect="output")
    stage.until_mid_decode(with_output, tokens=5)
    # The rows were complete with the prompt, and may have been read already.
    stage.abort(aborted, expect="prompt")
    stage.abort(with_output)


def aborted_although_it_has_stop_strings(stage: Stage) -> None:
    """The engine cannot distinguish this from a stop string, so the file stays for the consumer."""
    aborted = stage.add(
        tokens(42), name="with-stop", max_tokens=50, expect="output", stop=["no such text"]
    )
    stage.until_mid_decode(aborted, tokens=5)
    stage.abort(aborted, expect="output")


def aborted_samples(stage: Stage) -> None:
    aborted = stage.add(
        tokens(43), name="samples", n=2, max_tokens=50, expect="output", temperature=1.0, seed=5
    )
    stage.until_mid_decode(aborted, tokens=5)
    stage.abort(aborted)


def aborted_after_it_has_finished(stage: Stage) -> None:
    finished = stage.add(tokens(40), name="finished", max_tokens=3)
    stage.drain()
    stage.abort(finished, expect="prompt")


# Generated tokens


def one_token_and_many(stage: Stage) -> None:
    stage.add(tokens(12), name="one", max_tokens=1)
    many = stage.add(tokens(13), name="many", max_tokens=150)
    stage.drain()
    assert len(many.tokens) == 150


def rows_of_generated_tokens(stage: Stage) -> None:
    stage.add(tokens(12), name="one", max_tokens=1, expect="output")
    stage.add(tokens(13), name="two", max_tokens=2, expect="output")
    stage.add(tokens(14), name="sampled", max_tokens=40, expect="output", temperature=1.0, seed=4)
    stage.until_mid_decode(
        stage.add(tokens(15), name="many", max_tokens=150, expect="output"), tokens=20
    )
    stage.add(tokens(3 * CHUNK + 2), name="chunked", max_tokens=30, expect="output")
    stage.add(tokens(16), name="without", max_tokens=30)


def several_completions_of_a_prompt(stage: Stage) -> None:
    stage.add(tokens(21), name="n3", n=3, max_tokens=6, temperature=1.0, seed=1)
    with_output = stage.add(
        tokens(2 * CHUNK + 1),
        name="n2",
        n=2,
        max_tokens=6,
        temperature=1.0,
        seed=2,
        expect="output",
    )
    stage.drain()
    assert with_output.completions[0] != with_output.completions[1]


def streamed(stage: Stage) -> None:
    whole = stage.add(tokens(22), name="whole", max_tokens=12, expect="output")
    stage.drain()
    deltas = stage.add(
        tokens(22), name="deltas", max_tokens=12, output_kind="DELTA", expect="output"
    )
    stage.drain()
    assert [len(new) for _, new in deltas.updates] == [1] * 12
    assert (deltas.tokens, deltas.texts[0]) == (whole.tokens, whole.texts[0])


def stopped_by_a_string(stage: Stage) -> None:
    free = stage.add(tokens(23), name="free", max_tokens=40)
    stage.drain()
    stop = free.texts[0][len(free.texts[0]) // 2 :][:4]
    stopped = [
        stage.add(tokens(23), name="prompt-only", max_tokens=40, stop=[stop]),
        stage.add(tokens(23), name="with-output", max_tokens=40, stop=[stop], expect="output"),
    ]
    stage.drain()
    assert [each.stop_reasons[0] for each in stopped] == [stop, stop]
    assert len(stopped[1].tokens) < 40


def stopped_by_a_token(stage: Stage) -> None:
    free = stage.add(tokens(24), name="free", max_tokens=30)
    stage.drain()
    stop = free.tokens[12]
    stopped = stage.add(
        tokens(24), name="stopped", max_tokens=30, stop_token_ids=[stop], expect="output"
    )
    stage.drain()
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]


def structured_outputs(stage: Stage) -> None:
    """The sampler waits for the grammar, so the drafter runs later."""
    beside = stage.add(tokens(27), name="beside", max_tokens=30, expect="output")
    stage.until_mid_decode(beside)
    for index in range(2):
        stage.add(
            tokens(28 + index),
            name=f"digits-{index}",
            max_tokens=40,
            expect="output",
            ignore_eos=False,
            structured_outputs={"regex": "[0-9]{4,6}"},
        )
    chunked = stage.add(
        tokens(2 * CHUNK),
        name="chunked",
        max_tokens=30,
        ignore_eos=False,
        structured_outputs={"choice": ["yes", "no"]},
    )
    stage.drain()
    assert chunked.texts[0] in ("yes", "no")


def log_probabilities(stage: Stage) -> None:
    stage.add(tokens(2 * CHUNK + 3), name="of-the-prompt", max_tokens=3, prompt_logprobs=2)
    stage.add(tokens(20), name="of-the-output", max_tokens=5, logprobs=2, expect="output")


# Parameters of requests


def some_opt_out(stage: Stage) -> None:
    for index in range(6):
        if index % 2:
            stage.add(
                tokens(30 + index),
                name=f"opts-out-{index}",
                expect="nothing",
                params={"hidden_states": False},
                max_tokens=4,
            )
        else:
            stage.add(tokens(30 + index), name=f"extracted-{index}", max_tokens=4)


def hostile_request_ids(stage: Stage) -> None:
    for name in ("a/b/../../c", "..", "-rf", "a b\n", "." * 300, "~", "ü"):
        stage.add(tokens(11), name=name)


def params_that_make_no_sense(stage: Stage) -> None:
    refused = stage.add(
        tokens(25), name="refused", expect="nothing", params={"hidden_states": "yes"}, max_tokens=3
    )
    beside = stage.add(tokens(25), name="beside", max_tokens=3)
    stage.drain()
    assert refused.kv_transfer_params == {
        "hidden_states_error": "kv_transfer_params.hidden_states is 'yes'; use true or false"
    }
    assert refused.tokens == beside.tokens


def prompts_without_token_ids(stage: Stage) -> None:
    embeds = stage.add(
        tokens(26), name="embeds", expect="nothing", max_tokens=5, options={"as_embeds": True}
    )
    beside = stage.add(tokens(26), name="beside", max_tokens=5)
    stage.drain()
    assert embeds.kv_transfer_params == {
        "hidden_states_error": "prompt_embeds have no token ids to store; send token ids or text"
    }
    assert embeds.tokens == beside.tokens


def urgent_requests_overtake(stage: Stage) -> None:
    patient = [
        stage.add(tokens(3 * CHUNK, seed=index), name=f"patient-{index}", options={"priority": 5})
        for index in range(3)
    ]
    stage.until_mid_prefill(patient[0])
    urgent = stage.add(tokens(3 * CHUNK, seed=9), name="urgent", options={"priority": 0})
    stage.until(lambda: urgent.finished)
    assert [each.finished for each in patient] == [True, False, False]


# The engine


def asleep_and_awake(stage: Stage) -> None:
    """Level 0. Levels 1 and 2 unmap device memory: test_sleep.py."""
    kept = stage.add(tokens(5 * CHUNK, seed=20), name="kept-by-sleep")
    stage.until_mid_prefill(kept)
    stage.session.call("sleep", 0, "keep")
    waiting = stage.add(tokens(40), name="sent-while-asleep", max_tokens=4)
    stage.step(3)
    assert stage.progress(waiting)["computed"] == 0
    stage.session.call("wake_up", ["scheduling"])
    stage.until(lambda: waiting.finished)
    aborted = stage.add(tokens(5 * CHUNK, seed=21), name="aborted-by-sleep")
    stage.until_mid_prefill(aborted)
    stage.session.call("sleep", 0, "abort")
    assert not stage.progress(aborted)
    stage.abort(aborted)  # an engine in the caller's process is not notified
    stage.session.call("wake_up", ["scheduling"])


def another_engine_in_the_process(stage: Stage) -> None:
    stage.add(tokens(50), name="before", max_tokens=2)
    stage.check()
    decoding = stage.add(
        tokens(30),
        name="cut-off-in-its-output",
        expect="stopped",
        params={"include_output_tokens": True},
        max_tokens=50,
    )
    stage.until_mid_decode(decoding)
    stage.until_mid_prefill(
        stage.add(tokens(5 * CHUNK), name="cut-off-in-its-prompt", expect="stopped")
    )
    stage.restart(OTHER_LAYER_IDS)
    stage.add(tokens(50), name="same-prompt", max_tokens=2)
    stage.add(tokens(3 * CHUNK), name="chunked")
