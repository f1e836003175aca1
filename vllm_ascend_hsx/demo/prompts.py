"""The sixteen prompts of the demo: token ids, text and chat, of 3 to 300 tokens.

Nine of them generate 33 tokens or more. Rows of these tokens are extracted, too.
"""

import random
from collections.abc import Sequence
from typing import Literal, NamedTuple

TEXTS = (
    "What is the capital of France?",
    (
        "A draft model learns to guess what its target model says next. Explain in one paragraph "
        "why "
        "it needs the hidden states."
    ),
    "Tokyo, 東京, كيوتو, Ærøskøbing ☃: every byte is a token here.",
)
CHATS = (
    "Write a short story about a river.",
    "Which ranks take part in a collective when one of them has nothing to do?",
)
# Sent one by one: the other data-parallel rank is then idle. The first generates. The second is
# prefilled in chunks. The third shares the first 200 tokens, which prefix caching could skip.
ALONE = (3, 300, 260)
SHARED_PREFIX = 200
# Sent together with the texts and chats: lengths that are not multiples of the TP size, lengths
# around the size of a KV block (128), and one that is prefilled in chunks while others decode.
TOGETHER = (5, 6, 17, 33, 64, 127, 129, 281)
GENERATED = 33  # minimum of tokens for a request that generates; the last token has no row


class Prompt(NamedTuple):
    """One request. Prompts of the same wave are sent together; waves run one after the other.

    Attributes:
        max_tokens: tokens to generate. If there are several, their rows are extracted, too.
    """

    kind: Literal["token ids", "text", "chat"]
    content: list[int] | str
    wave: int
    max_tokens: int = 1

    @property
    def generates(self) -> bool:
        return self.max_tokens > 1


def demo_prompts(vocab_size: int, *, seed: int = 0) -> list[Prompt]:
    """Return the sixteen prompts. They depend only on the arguments.

    Token ids are drawn from ordinary tokens below vocab_size.
    """
    draw = random.Random(seed)
    alone = draw_tokens(draw, ALONE, vocab_size)
    alone[2][:SHARED_PREFIX] = alone[1][:SHARED_PREFIX]
    last = len(alone)
    prompts = [
        Prompt("token ids", tokens, wave, 1 if wave else GENERATED)
        for wave, tokens in enumerate(alone)
    ]
    # They end one after the other: each number of concurrent decodes occurs in some step.
    together = enumerate(draw_tokens(draw, TOGETHER, vocab_size))
    prompts += [Prompt("token ids", tokens, last, GENERATED + index) for index, tokens in together]
    prompts += [Prompt("text", text, last) for text in TEXTS]
    prompts += [Prompt("chat", text, last) for text in CHATS]
    return prompts


def draw_tokens(draw: random.Random, lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Return prompts of these lengths, of ordinary tokens below vocab_size.

    The lowest ids are special tokens in many vocabularies.
    """
    first, end = min(100, vocab_size // 2), min(vocab_size, 20_000)
    return [[draw.randrange(first, end) for _ in range(length)] for length in lengths]
