"""Build a small byte-level BPE tokenizer with a chat template, without a download."""

from transformers import PreTrainedTokenizerFast

BOS, EOS, ROLE, PAD = "]~!b[", "[e~[", "]~b]", "]!p~["  # MiniMax-M2's own spellings
SPECIAL_TOKENS = (PAD, BOS, EOS, ROLE)
CHAT_TEMPLATE = (
    f"{{{{ '{BOS}' }}}}{{% for message in messages %}}{{{{ '{ROLE}' + message['role'] + '\n'"
    f" + message['content'] + '{EOS}\n' }}}}{{% endfor %}}{{% if add_generation_prompt %}}{{{{ "
    f"'{ROLE}ai\n' }}}}{{% endif %}}"
)
# Enough English for merges that give ordinary words one to three tokens.
TRAINING_TEXT = (
    (
        "A draft model learns to guess what its target model says next. The hidden states of "
        "chosen "
        "layers are what it sees."
    ),
    (
        "Every token of a prompt leaves one row per layer: the residual stream after that many "
        "layers, before the final norm."
    ),
    (
        "The scheduler cuts a long prompt into chunks, and other requests join and leave the batch "
        "while it runs."
    ),
    (
        "Sequence parallelism splits the tokens of a step over the ranks; data parallel ranks take "
        "turns and keep in step."
    ),
    (
        "What is the capital of France? Write a short story about a river, a bridge and the people "
        "who cross it every day."
    ),
    (
        "When the sun rose over the harbour, the ships were ready, and the captain asked for one "
        "more cup of coffee."
    ),
)


def build_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer for any text. The ids are below vocab_size and the same on every machine.

    Raises ValueError if vocab_size is too small for the 256 bytes and the special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    least = 256 + len(SPECIAL_TOKENS)
    if vocab_size < least:
        raise ValueError(
            f"vocab_size={vocab_size} is too small for a byte-level tokenizer; give at least "
            f"{least}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[ROLE],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
