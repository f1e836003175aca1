"""Test random numbers: seeds, streams, and Philox offsets that can be reset."""

import pytest
import torch
from emulated import NPU

BOTH = pytest.mark.usefixtures("any_mode")


def draw(generator: torch.Generator) -> list[float]:
    return torch.empty(4, device=NPU).exponential_(generator=generator).tolist()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator(device=NPU).manual_seed(7)


def test_draw_advances_the_offset_by_12_and_a_reset_offset_repeats_draws(
    generator: torch.Generator,
) -> None:
    assert generator.get_offset() == 0
    first, second, third = draw(generator), draw(generator), draw(generator)
    assert first != second
    assert generator.get_offset() == 36
    generator.set_offset(12)
    assert [draw(generator), draw(generator)] == [second, third]


def test_offset_reset_by_4_gives_another_draw(generator: torch.Generator) -> None:
    """vllm-ascend 0.23.0 resets the offset by 4 (model_runner_v1.py:2666). An NPU step is 12."""
    first = draw(generator)
    generator.set_offset(generator.get_offset() - 4)
    assert draw(generator) != first


def test_offset_must_be_a_multiple_of_four(generator: torch.Generator) -> None:
    with pytest.raises(RuntimeError, match="multiple of 4"):
        generator.set_offset(6)


def test_state_and_clone_carry_seed_and_offset(generator: torch.Generator) -> None:
    draw(generator)
    state, copy, other = generator.get_state(), generator.clone_state(), torch.Generator(device=NPU)
    assert state.numel() == 16
    other.set_state(state)
    assert draw(generator) == draw(copy) == draw(other)
    with pytest.raises(RuntimeError, match="RNG state"):
        other.set_state(torch.Generator().get_state())


def test_same_seed_repeats_the_sequence_and_another_seed_changes_it(
    generator: torch.Generator,
) -> None:
    first = draw(generator)
    assert draw(generator.manual_seed(7)) == first
    assert draw(generator.manual_seed(8)) != first


@BOTH
def test_seeds_make_draws_repeatable_without_changing_the_cpu_generator() -> None:
    torch.manual_seed(3)
    cpu = torch.rand(4)
    torch.manual_seed(3)
    first = torch.rand(4, device=NPU)
    assert torch.equal(torch.rand(4), cpu)
    torch.npu.manual_seed(3)
    assert torch.equal(torch.rand(4, device=NPU).cpu(), first.cpu())
    state = torch.npu.get_rng_state()
    draws = (torch.randn, (2,)), (torch.randint, (9, (3,))), (torch.randperm, (5,))
    drawn = [make(*args, device=NPU).tolist() for make, args in draws]
    torch.npu.set_rng_state(state)
    assert [make(*args, device=NPU).tolist() for make, args in draws] == drawn


@BOTH
def test_generator_works_only_on_its_device() -> None:
    g = torch.Generator(device=NPU).manual_seed(5)
    assert g.device == NPU
    x = torch.empty(4, device=NPU).exponential_(generator=g)
    g.manual_seed(5)
    assert torch.equal(torch.empty(4, device=NPU).exponential_(generator=g).cpu(), x.cpu())
    with pytest.raises(RuntimeError, match="generator"):
        torch.empty(4, device=NPU).exponential_(generator=torch.Generator())


@BOTH
def test_draws_on_a_side_stream_follow_launch_order() -> None:
    torch.npu.manual_seed(1)
    expected = [torch.empty(3, device=NPU).exponential_().tolist() for _ in range(3)]
    torch.npu.manual_seed(1)
    side, drawn = torch.npu.Stream(), []
    for stream in (side, torch.npu.default_stream(), side):
        with torch.npu.stream(stream):
            drawn.append(torch.empty(3, device=NPU).exponential_())
    torch.npu.synchronize()
    assert [draw.tolist() for draw in drawn] == expected
