"""The sixteen prompts of the demo: token ids, text and chat, of 3 to 300 tokens."""

import random
from typing import Literal, NamedTuple

TEXTS = (
    "What is the capital of France?",
    "A draft model learns to guess what its target model says next. Explain in one paragraph why it needs the hidden states.",
    "Tokyo, 東京, كيوتو, Ærøskøbing ☃: every byte is a token here.",
)
CHATS = ("Write a short story about a river.", "Which ranks take part in a collective when one of them has nothing to do?")
# Sent one by one, so that the other data-parallel rank is idle. The second is prefilled in chunks.
# The third shares its first 200 tokens, which the server could skip by prefix caching.
ALONE = (3, 300, 260)
SHARED_PREFIX = 200
# Sent together with the texts and chats: lengths that are not multiples of the TP size, lengths
# around the size of a KV block (128), and one that is prefilled in chunks while others decode.
TOGETHER = (5, 6, 17, 33, 64, 127, 129, 281)


class Prompt(NamedTuple):
    """One request. Prompts of the same wave are sent together; waves run one after the other."""

    kind: Literal["token ids", "text", "chat"]
    content: list[int] | str
    wave: int


def demo_prompts(vocab_size: int, *, seed: int = 0) -> list[Prompt]:
    """Return the sixteen prompts, which depend on the arguments only.

    Token ids are drawn from ordinary tokens below vocab_size.
    """
    draw = random.Random(seed)

    def ids(count: int) -> list[int]:
        # The lowest ids are special tokens in many vocabularies.
        return [draw.randrange(min(100, vocab_size // 2), min(vocab_size, 20_000)) for _ in range(count)]

    alone = [ids(count) for count in ALONE]
    alone[2][:SHARED_PREFIX] = alone[1][:SHARED_PREFIX]
    prompts = [Prompt("token ids", tokens, wave) for wave, tokens in enumerate(alone)]
    prompts += [Prompt("token ids", ids(count), len(alone)) for count in TOGETHER]
    prompts += [Prompt("text", text, len(alone)) for text in TEXTS]
    prompts += [Prompt("chat", text, len(alone)) for text in CHATS]
    return prompts
