"""One small tokenizer of each kind that models have, trained on the spot."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests import tiny

SPECIAL = ["<unk>", "<s>", "</s>"]
ALPHABET = [chr(code) for code in range(32, 127)]
VOCABULARY = 400  # of the tiny models


def _byte_level() -> Any:
    """GPT-2, Llama 3, Qwen: bytes, words split off by a pattern."""
    return tiny.tokenizer().backend_tokenizer


def _metaspace() -> Any:
    """SentencePiece's way: white space is a letter, and one stands before every text."""
    return tiny.tokenizer(style="metaspace").backend_tokenizer


def _converted() -> Any:
    """Llama 2 and Mistral as converted from SentencePiece: no words, tokens reach across them; rare ones are bytes."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁"), "merged_with_next")
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = sorted({*tiny.SENTENCE.replace(" ", "▁"), *"?.:[]QPTW0123456789"})
    room = VOCABULARY - len(SPECIAL) - len(byte_tokens) - 1
    trainer = trainers.BpeTrainer(vocab_size=room, initial_alphabet=letters, show_progress=False)
    trained.train_from_iterator([tiny.text(400, seed) for seed in range(3)], trainer)
    known = trained.get_vocab()
    vocabulary = [*SPECIAL, *byte_tokens, *sorted(known, key=known.__getitem__), "▁▁"]
    merges = [*map(tuple, json.loads(trained.to_str())["model"]["merges"]), ("▁", "▁")]
    ids = {piece: number for number, piece in enumerate(vocabulary)}
    inner = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = trained.normalizer
    strip = decoders.Strip(" ", 1, 0)
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return inner


def _unigram() -> Any:
    """T5, XLM-R and Gemma's relatives: the likeliest cut of the whole text."""
    inner = Tokenizer(models.Unigram())
    inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    inner.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        unk_token="<unk>",
        initial_alphabet=[*ALPHABET, "\n", "▁"],
        show_progress=False,
    )
    inner.train_from_iterator([tiny.text(400, seed) for seed in range(3)], trainer)
    return inner


def _word_piece() -> Any:
    """BERT's way: white space is no token, and the inside of a word is written with ``##``."""
    inner = Tokenizer(models.WordPiece(unk_token="<unk>"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=False)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=ALPHABET, show_progress=False
    )
    inner.train_from_iterator([tiny.text(400, seed) for seed in range(3)], trainer)
    return inner


MAKERS = {
    "byte-level BPE": _byte_level,
    "metaspace BPE": _metaspace,
    "converted BPE": _converted,
    "Unigram": _unigram,
    "WordPiece": _word_piece,
}


@cache
def tokenizer_of(kind: str) -> Any:
    """A tokenizer of a kind, which puts ``<s>`` before a text; without chat template."""
    inner = MAKERS[kind]()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )
    assert len(tokenizer) <= VOCABULARY
    return tokenizer
