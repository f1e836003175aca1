"""Train a tiny Qwen3 on the stories until it predicts words that follow from earlier words."""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.loop.corpus import (
    BOS,
    BOS_ID,
    EOS,
    EOS_ID,
    PAD,
    PAD_ID,
    UNKNOWN,
    VOCABULARY,
    stories,
)

MARKER = "hsx_loop_target.json"
VOCAB_SIZE = 128
LAYERS = 4
LAYER_IDS = (
    1,
    2,
    3,
    4,
)  # three inputs of the draft, and the last layer, the training target of the draft
BATCH = 32
LEARNING_RATE = 3e-3
WARM_UP_STEPS = 30
TRAINING_SEED = 1  # of the stories; rows and evaluation use stories of other seeds


def build_target(
    directory: Path, *, steps: int, on_step: Callable[[int, float], None] = lambda step, loss: None
) -> Path:
    """Train a model for `steps` steps of 32 stories, and return the directory.

    An existing model with the same number of steps is kept. Call on_step(step, loss) after each
    step.
    """
    recipe = {"steps": steps, "vocabulary": len(VOCABULARY)}
    if (directory / MARKER).is_file() and json.loads((directory / MARKER).read_text()) == recipe:
        return directory
    model, loss = _train(steps, on_step)
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        model.to(torch.bfloat16).save_pretrained(scratch)
        _tokenizer().save_pretrained(scratch)
        (scratch / "loss.json").write_text(json.dumps({"loss": loss}))
        (scratch / MARKER).write_text(json.dumps(recipe))
        if directory.exists():
            shutil.rmtree(directory)
        scratch.rename(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


class Target(NamedTuple):
    """A checkpoint to serve."""

    directory: Path
    quantised: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        """Additional options of `vllm serve`."""
        return ("--quantization", "ascend") if self.quantised else ()


def loss_of(directory: Path) -> float:
    """Return the mean loss of the last twenty training steps, in nats per token."""
    loss: float = json.loads((directory / "loss.json").read_text())["loss"]
    return loss


def _train(steps: int, on_step: Callable[[int, float], None]) -> tuple[Any, float]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP_STEPS, 1 - 0.95 * step / steps)
    )
    corpus = stories(steps * BATCH, seed=TRAINING_SEED)
    losses = []
    for step in range(steps):
        rows = [torch.tensor(row) for row in corpus[step * BATCH : (step + 1) * BATCH]]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD_ID)
        loss = model(input_ids=tokens, labels=tokens.masked_fill(tokens == PAD_ID, -100)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        on_step(step + 1, losses[-1])
    last = losses[-20:]
    return model.eval(), sum(last) / len(last)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNKNOWN
    )
