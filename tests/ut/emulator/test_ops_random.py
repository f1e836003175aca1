"""The device's generators count as Philox does: what vllm-ascend relies on when it throws a sample away."""

import pytest
import torch
import torch_npu  # noqa: F401  (brings torch.npu)


def draw(generator: torch.Generator) -> list[float]:
    return torch.empty(4, device="npu").exponential_(generator=generator).tolist()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator(device="npu").manual_seed(7)


def test_each_draw_is_new_and_moves_the_offset_by_twelve(generator: torch.Generator) -> None:
    assert generator.get_offset() == 0
    first, second = draw(generator), draw(generator)
    assert first != second
    assert generator.get_offset() == 24


def test_an_offset_that_is_set_back_repeats_the_draw(generator: torch.Generator) -> None:
    draw(generator)
    second = draw(generator)
    third = draw(generator)
    generator.set_offset(12)
    assert [draw(generator), draw(generator)] == [second, third]


def test_an_offset_set_back_by_four_is_legal_and_another_draw(generator: torch.Generator) -> None:
    """vllm-ascend 0.23.0 goes back by 4 (model_runner_v1.py:2666), which is less than a draw's step on an NPU."""
    first = draw(generator)
    generator.set_offset(generator.get_offset() - 4)
    assert draw(generator) != first


def test_an_offset_between_the_steps_of_four_is_refused(generator: torch.Generator) -> None:
    with pytest.raises(RuntimeError, match="multiple of 4"):
        generator.set_offset(6)


def test_state_and_clone_carry_seed_and_offset(generator: torch.Generator) -> None:
    draw(generator)
    state, copy = generator.get_state(), generator.clone_state()
    assert state.numel() == 16
    expected = draw(generator)
    assert draw(copy) == expected
    other = torch.Generator(device="npu")
    other.set_state(state)
    assert draw(other) == expected
    with pytest.raises(RuntimeError, match="RNG state"):
        other.set_state(torch.Generator().get_state())


def test_a_seed_starts_over_and_seeds_differ(generator: torch.Generator) -> None:
    first = draw(generator)
    assert draw(generator.manual_seed(7)) == first
    assert draw(generator.manual_seed(8)) != first
