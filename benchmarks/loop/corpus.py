"""Generate stories with a vocabulary of about fifty words. A tiny model learns them in a minute.

Half of the words in a story follow from earlier words. A draft with wrong hidden states predicts
them no better than chance.
"""

import random
from collections.abc import Sequence

PAD, BOS, EOS, UNKNOWN = SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD_ID, BOS_ID, EOS_ID, _ = range(len(SPECIAL_TOKENS))
PEOPLE = ("Anna", "Boris", "Clara", "David", "Emma", "Felix", "Greta", "Henry")
THINGS = ("apple", "candle", "drum", "flute", "hammer", "kettle", "ladder", "mirror")
COLOURS = ("red", "blue", "green", "white", "black", "yellow")
PLACES = ("harbour", "market", "forest", "castle", "library", "station")
NUMBERS = tuple(map(str, range(9)))
COUNTED = 5
OTHERS = (
    ".",
    "?",
    ":",
    "has",
    "a",
    "they",
    "meet",
    "near",
    "the",
    "of",
    "is",
    "who",
    "takes",
    "to",
    "count",
)
WORDS = (*PEOPLE, *THINGS, *COLOURS, *PLACES, *NUMBERS, *OTHERS)
VOCABULARY = {word: number for number, word in enumerate((*SPECIAL_TOKENS, *WORDS))}
# A prompt is BOS and the first two lines of a story.
PROMPT_TOKENS = 1 + 2 * 6


def story(draw: random.Random) -> str:
    """Return a story: two people with a thing each, a place, facts about them, and a count."""
    people, things, colours = (draw.sample(names, 2) for names in (PEOPLE, THINGS, COLOURS))
    place = draw.choice(PLACES)
    lines = [
        f"{person} has a {colour} {thing} ."
        for person, colour, thing in zip(people, colours, things, strict=True)
    ]
    lines.append(f"they meet near the {place} .")
    for i in draw.sample(range(2), 2):
        person, colour, thing = people[i], colours[i], things[i]
        known = (
            f"the {thing} of {person} is {colour} .",
            f"who has the {colour} {thing} ? {person} has the {colour} {thing} .",
            f"{person} takes the {colour} {thing} to the {place} .",
        )
        lines.append(draw.choice(known))
    first = draw.randint(0, len(NUMBERS) - COUNTED)
    lines.append(f"count : {' '.join(NUMBERS[first : first + COUNTED])} .")
    return " ".join(lines)


def stories(count: int, *, seed: int) -> list[list[int]]:
    """Return the token ids of `count` stories, each from BOS to EOS."""
    draw = random.Random(seed)
    return [[BOS_ID, *encode(story(draw)), EOS_ID] for _ in range(count)]


def encode(text: str) -> list[int]:
    """Return the ids of words separated by spaces. Raise KeyError for an unknown word."""
    return [VOCABULARY[word] for word in text.split()]


def decode(token_ids: Sequence[int]) -> str:
    """Return the words of token ids."""
    words = (*SPECIAL_TOKENS, *WORDS)
    return " ".join(words[token] if token < len(words) else UNKNOWN for token in token_ids)
