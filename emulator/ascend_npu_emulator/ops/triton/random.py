"""Triton's random numbers: Philox 4x32 with ten rounds, keyed by a seed and counting offsets.

Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), and the
layout of Triton's library: the counter is (offset, 0, 0, 0), the key has both halves of the seed.
"""

from typing import Any

import torch

_ROUNDS = 10
_WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_SCALE = 4.6566127342e-10  # the largest float32 whose product with 2**31 - 1 is below 1


def philox(counter: list[torch.Tensor], key: tuple[int, int]) -> list[torch.Tensor]:
    """Return four blocks of random words, as int64 in [0, 2**32).

    Args:
        counter: four blocks of words of one shape.
        key: two words.
    """
    zero, one, two, three = counter
    low, high = key
    for _ in range(_ROUNDS):
        zero, one, two, three = (
            _high(_MULTIPLIERS[1], two) ^ one ^ low, (_MULTIPLIERS[1] * two) & _WORD,
            _high(_MULTIPLIERS[0], zero) ^ three ^ high, (_MULTIPLIERS[0] * zero) & _WORD,
        )  # fmt: skip
        low, high = (low + _WEYL[0]) & _WORD, (high + _WEYL[1]) & _WORD
    return [zero, one, two, three]


def _high(factor: int, words: torch.Tensor) -> torch.Tensor:
    """Return the upper words of products. They exceed int64, so the factor is split in halves."""
    low = (factor & 0xFFFF) * words
    return ((factor >> 16) * words + (low >> 16)) >> 16


def randint(seed: Any, offset: Any) -> torch.Tensor:
    """Return random int32, of the shape of ``offset``."""
    count = torch.as_tensor(offset).long() & _WORD
    key = int(seed) & 0xFFFFFFFFFFFFFFFF
    word = philox([count, *[torch.zeros_like(count)] * 3], (key & _WORD, key >> 32))[0]
    return torch.where(word > 0x7FFFFFFF, word - (1 << 32), word).to(torch.int32)


def rand(seed: Any, offset: Any) -> torch.Tensor:
    """Return random float32 in [0, 1), of the shape of ``offset``."""
    word = randint(seed, offset)
    return torch.where(word < 0, -word - 1, word).to(torch.float32) * _SCALE
