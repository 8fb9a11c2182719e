"""Train the reference embedder: ``python -m tests.toy.train_embedder --out FOLDER``.

A sentence-transformers ``StaticEmbedding``: one vector a subword, averaged. It is trained with that library's own
trainer on question, passage and distractor triplets from towns of the train split; passages come with their title.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend_rag.errors import ConfigError
from tests.toy import EMBEDDER_PATH
from tests.toy.archive import Town, TownSize, build_town
from tests.toy.names import Split
from tests.toy.questions import QUESTION_KINDS, Question, ask_all
from tests.toy.tokenizer import training_text


@dataclass(frozen=True)
class EmbedderOptions:
    """How to train; ``towns`` is the number of train towns the triplets come from."""

    out: Path
    seed: int = 0
    towns: int = 60
    triplets_a_town: int = 120
    epochs: int = 1
    vocab_size: int = 2048
    dimension: int = 64
    rate: float = 0.1

    def __post_init__(self) -> None:
        for name in ("towns", "triplets_a_town", "epochs", "dimension"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "use a positive number")


def train_subwords(vocab_size: int) -> Any:
    """Return a lower-casing byte-level BPE in which a word is the same wherever in a text it stands."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    return tokenizer


def _triplets(options: EmbedderOptions) -> dict[str, list[str]]:
    """Pair each question with a passage it needs and with another passage of the same town."""
    rng = random.Random(f"embedder/{options.seed}")
    rows: dict[str, list[str]] = {"anchor": [], "positive": [], "negative": []}
    for seed in range(options.towns):
        town = build_town(seed, "train", TownSize())
        asked = ask_all(town)
        for question in rng.sample(asked, min(options.triplets_a_town, len(asked))):
            # The first passage needed always names what is asked about; a later one often does not.
            positive = question.needs[0] if rng.random() < 0.5 else rng.choice(question.needs)
            negative = rng.choice([one.index for one in town.passages if one.index not in question.needs])
            rows["anchor"].append(question.question)
            rows["positive"].append(town.passages[positive].chunk)
            rows["negative"].append(town.passages[negative].chunk)
    return rows


def train(options: EmbedderOptions) -> None:
    """Train and save the embedder."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
    from sentence_transformers.sentence_transformer.training_args import BatchSamplers

    words = StaticEmbedding(train_subwords(options.vocab_size), embedding_dim=options.dimension)
    model = SentenceTransformer(modules=[words, Normalize()], device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        arguments = Arguments(
            output_dir=folder,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=256,
            learning_rate=options.rate,
            lr_scheduler_type="linear",
            warmup_steps=20,
            batch_sampler=BatchSamplers.NO_DUPLICATES,
            save_strategy="no",
            report_to="none",
            logging_steps=50,
            use_cpu=True,
            seed=options.seed,
        )
        trainer = SentenceTransformerTrainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_dict(_triplets(options)),
            loss=MultipleNegativesRankingLoss(model),
        )
        trainer.train()
    model.save_pretrained(str(options.out), create_model_card=False)


@dataclass(frozen=True)
class Recall:
    """Share of passages found among the nearest, for one kind of question.

    ``naming`` counts the needed passages whose title or text names something the question names; ``other`` those
    that do not; ``all_found`` is the share of questions all of whose passages are found.
    """

    kind: str
    questions: int
    naming: float
    other: float | None
    all_found: float


def _names_asked(town: Town, question: Question, index: int) -> bool:
    chunk = town.passages[index].chunk
    return any(entity.name in question.question and entity.name in chunk for entity in town.entities)


def measure_recall(model: Any, *, towns: int = 4, top_k: int = 6, split: Split = "test") -> list[Recall]:
    """Measure recall at ``top_k`` over whole towns.

    Questions that name nobody ("Where does the baker live?") count as not naming.
    """
    found: dict[str, list[tuple[list[bool], list[bool]]]] = {kind: [] for kind in QUESTION_KINDS}
    for seed in range(50, 50 + towns):
        town = build_town(seed, split)
        asked = ask_all(town)
        texts, questions = [one.chunk for one in town.passages], [one.question for one in asked]
        passages = model.encode(texts, normalize_embeddings=True, show_progress_bar=False)
        wanted = model.encode(questions, normalize_embeddings=True, show_progress_bar=False)
        nearest = (-(wanted @ passages.T)).argsort(axis=1, kind="stable")[:, :top_k]
        for question, row in zip(asked, nearest.tolist(), strict=True):
            naming = [index for index in question.needs if _names_asked(town, question, index)]
            other = [index for index in question.needs if index not in naming]
            found[question.kind].append(([i in row for i in naming], [i in row for i in other]))
    results = []
    for kind, rows in found.items():
        naming_hits = [hit for naming, _ in rows for hit in naming]
        other_hits = [hit for _, other in rows for hit in other]
        results.append(
            Recall(
                kind,
                len(rows),
                sum(naming_hits) / max(1, len(naming_hits)),
                sum(other_hits) / len(other_hits) if other_hits else None,
                sum(all(naming) and all(other) for naming, other in rows) / max(1, len(rows)),
            )
        )
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; prints recall by kind, one JSON object a line."""
    from sentence_transformers import SentenceTransformer

    parser = argparse.ArgumentParser(prog="python -m tests.toy.train_embedder", description=__doc__)
    parser.add_argument("--out", type=Path, default=EMBEDDER_PATH)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--towns", type=int, default=EmbedderOptions.towns)
    parser.add_argument("--epochs", type=int, default=EmbedderOptions.epochs)
    parser.add_argument("--measure-only", action="store_true", help="measure what is in the folder already")
    args = parser.parse_args(argv)
    if not args.measure_only:
        train(EmbedderOptions(args.out, args.seed, args.towns, epochs=args.epochs))
    model = SentenceTransformer(str(args.out), device="cpu")
    for result in measure_recall(model):
        print(json.dumps(vars(result)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
