"""The reference model's byte-level BPE tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.toy.archive import build_town
from tests.toy.names import part_pattern
from tests.toy.prompts import FORMATS, SEPARATORS
from tests.toy.questions import ask_all

BOS = "<s>"
EOS = "</s>"
VOCAB_SIZE = 3072
_TOWNS = 120


def training_text(towns: int = _TOWNS) -> Iterator[str]:
    """Yield the text the vocabulary is learned from: towns of the train split, and the prompt formats."""
    for form in FORMATS:
        yield from (form.prefix, form.suffix, form.before_chunk)
    yield from SEPARATORS
    for seed in range(towns):
        town = build_town(seed, "train")
        for passage in town.passages:
            yield passage.chunk
        for question in ask_all(town)[::3]:
            yield f" {question.question}"
            yield f" {question.sentence}"
        # Names open titles and texts without a space before them: let them be as short there.
        for entity in town.entities:
            yield from [entity.name] * 8


def train_tokenizer(vocab_size: int = VOCAB_SIZE, towns: int = _TOWNS) -> Any:
    """Train the tokenizer.

    Any text tokenises and comes back unchanged. Digits stand alone, and so does the second part of a name: a name
    seen for the first time has as many ids as a known one. No space is put before a text, BOS opens a text when
    special tokens are asked for.

    Returns
    -------
    transformers.PreTrainedTokenizerFast
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(part_pattern()), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(towns), trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )
