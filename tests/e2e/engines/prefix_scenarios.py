"""Scenarios of requests with a common prefix."""

from __future__ import annotations

from harness import tokens
from scenarios import BLOCK, CHUNK, preempt_a_prefill
from stage import Stage

from vllm_ascend_hsx.protocol.names import LOCK_SUFFIX
from vllm_ascend_hsx.reader.load import load


def repeated_and_extended_prompts(stage: Stage) -> None:
    prompt = tokens(3 * CHUNK + 20)
    stage.add(prompt, name="first", expect="nothing", params={"hidden_states": False})
    stage.drain()
    again = stage.add(prompt, name="again")
    extended = stage.add([*prompt, *tokens(30)], name="extended")
    ordinary = stage.add(
        [*prompt, *tokens(31)], name="ordinary", expect="nothing", params={"hidden_states": False}
    )
    stage.drain()
    assert again.num_cached_tokens == 0
    assert extended.num_cached_tokens in (0, BLOCK)  # it may wait for the rows of `again`
    assert ordinary.num_cached_tokens == BLOCK
    assert ordinary.kv_transfer_params is None


def repeated_prompts_at_the_same_time(stage: Stage) -> None:
    prompt = tokens(2 * BLOCK + 5)
    for index in range(3):
        stage.add(prompt, name=f"twin-{index}", max_tokens=3)


def rows_of_a_prefix_are_copied(stage: Stage) -> None:
    prompt = tokens(BLOCK + 20, seed=11)
    source = stage.add(prompt, name="source")
    stage.session.settle()
    requests = [
        stage.add(prompt, name="again"),
        stage.add([*prompt, *tokens(BLOCK - 10, seed=12)], name="extended"),
        stage.add(prompt[: BLOCK + 1], name="shorter", expect="output", max_tokens=5),
        stage.add(
            [*prompt[:BLOCK], *tokens(3, seed=13)],
            name="samples",
            n=2,
            expect="output",
            max_tokens=3,
            temperature=1.0,
            seed=1,
        ),
    ]
    stage.session.settle()
    assert [each.reused for each in (source, *requests)] == [0, BLOCK, BLOCK, BLOCK, BLOCK]
    less_than_a_block = stage.add(prompt[:BLOCK], name="a-block")
    stage.session.settle()
    assert less_than_a_block.reused == 0


def more_is_cached_than_there_are_rows_of(stage: Stage) -> None:
    """Rows of generated tokens, and of requests that opt out, are not reusable."""
    prompt = tokens(BLOCK + 5, seed=14)
    first = stage.add(prompt, name="prompt-only", max_tokens=BLOCK)
    stage.session.settle()
    turn = [*first.sequence(), *tokens(9, seed=15)]
    second = stage.add(turn, name="second-turn", expect="output", max_tokens=3)
    stage.session.settle()
    ordinary = stage.add(
        [*turn, *tokens(BLOCK, seed=16)],
        name="ordinary",
        expect="nothing",
        params={"hidden_states": False},
    )
    stage.session.settle()
    third = stage.add([*turn, *tokens(BLOCK + 1, seed=16)], name="third-turn")
    stage.session.settle()
    assert (first.reused, second.reused, third.reused) == (0, BLOCK, 2 * BLOCK)
    assert ordinary.num_cached_tokens == 2 * BLOCK


def cached_states_are_those_that_were_computed(stage: Stage) -> None:
    """A request continues from a cached state, extracted or not, and generates the same."""
    prompt = [*tokens(2 * BLOCK, seed=4), *tokens(9)]
    fresh = stage.add(prompt, name="fresh", max_tokens=8, expect="output")
    stage.session.settle()
    cached = stage.add(
        prompt, name="cached", expect="nothing", params={"hidden_states": False}, max_tokens=8
    )
    again = stage.add(prompt, name="again", max_tokens=8, expect="output")
    stage.drain()
    assert (fresh.reused, cached.num_cached_tokens, again.reused) == (0, 2 * BLOCK, 2 * BLOCK)
    assert fresh.tokens == cached.tokens == again.tokens


def the_source_of_a_prefix_is_removed(stage: Stage) -> None:
    prompt = tokens(BLOCK + 7, seed=17)
    source = stage.add(prompt, name="removed", expect="either")
    stage.session.settle()
    (path,) = stage.session.paths(source)
    load(path)
    path.unlink()
    path.with_name(path.name + LOCK_SUFFIX).unlink()
    again = stage.add(prompt, name="again")
    stage.session.settle()
    assert again.reused == BLOCK


def preempted_after_a_copied_prefix(stage: Stage) -> None:
    beginning = tokens(BLOCK, seed=19)
    stage.add([*beginning, 8], name="source")
    stage.session.settle()
    victim = preempt_a_prefill(stage, beginning)
    stage.session.settle()
    assert (victim.kv_transfer_params or {})["reused_tokens"] == BLOCK


def a_file_is_published_just_now(stage: Stage) -> None:
    """The scheduler learns of the file in the next step. The second request waits for it."""
    prompt = tokens(2 * BLOCK + 8)
    stage.add(prompt, name="first")
    stage.drain()
    stage.catch_up()
    second = stage.add(prompt, name="second")
    stage.drain()
    assert second.reused == 2 * BLOCK


def the_prefix_cache_is_reset(stage: Stage) -> None:
    prompt = tokens(2 * BLOCK + 6)
    before = [stage.add(prompt, name="before-the-reset")]
    stage.session.settle()
    before.append(stage.add(prompt, name="once-more"))
    stage.session.settle()
    assert stage.session.call("reset_prefix_cache")
    # This request fills the cache again, perhaps with other weights, and has no rows.
    stage.add(prompt, name="filler", expect="nothing", params={"hidden_states": False})
    stage.session.settle()
    after = [stage.add(prompt, name="after-the-reset")]
    stage.session.settle()
    after.append(stage.add(prompt, name="and-again"))
    stage.session.settle()
    assert (found := [each.reused for each in (*before, *after)]) == [0, 2 * BLOCK, 0, 2 * BLOCK], (
        found
    )
