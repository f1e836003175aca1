"""Training of the loop's target."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.loop.corpus import decode, stories
from benchmarks.loop.target import LAYER_IDS, build_target, loss_of


def test_loss_falls_and_a_trained_target_is_kept(tmp_path: Path) -> None:
    losses: list[float] = []
    target = build_target(
        tmp_path / "target", steps=12, on_step=lambda step, loss: losses.append(loss)
    )
    assert len(losses) == 12
    assert losses[-1] < 0.8 * losses[0]
    assert loss_of(target) > losses[-1]
    build_target(tmp_path / "target", steps=12, on_step=lambda step, loss: losses.append(loss))
    assert len(losses) == 12
    build_target(tmp_path / "target", steps=2, on_step=lambda step, loss: losses.append(loss))
    assert len(losses) == 14


def test_transformers_loads_the_target_and_the_tokenizer(tmp_path: Path) -> None:
    target = build_target(tmp_path / "target", steps=1)
    model = AutoModelForCausalLM.from_pretrained(target)
    assert model.config.num_hidden_layers == LAYER_IDS[-1]
    (story,) = stories(1, seed=0)
    assert AutoTokenizer.from_pretrained(target).encode(decode(story)) == story
