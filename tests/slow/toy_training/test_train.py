"""The trainer: copying is there from the start, a short run ends in a loadable model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheblend_rag.errors import ConfigError
from tests.toy.archive import build_town
from tests.toy.batches import make_batches
from tests.toy.curriculum import SequenceMaker, Stage, values_named
from tests.toy.grow import grow
from tests.toy.loss import Guidance, Probes, TrainingLoss, looking
from tests.toy.questions import ask_all
from tests.toy.sequences import ANSWER_WEIGHT, KIND_NAMES, TrainingSequence
from tests.toy.tokenizer import train_tokenizer
from tests.toy.train import STAGES, WIDER, Shape, Trainer, TrainOptions, build_model, read_options

pytestmark = pytest.mark.slow

TINY = Shape(layers=3, hidden=128, heads=2, kv_heads=1, head_dim=32, mlp=64)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(vocab_size=2048, towns=12)


def stage_of(name: str) -> Stage:
    return next(stage for stage in (*STAGES, *WIDER) if stage.name == name)


def in_order(tokenizer: Any, name: str, seed: int, count: int, **changes: Any) -> Iterator[TrainingSequence]:
    """Sequences of a stage in which nobody is written about before being introduced."""
    stage = replace(stage_of(name), shuffled=0.0, **changes)
    return islice(SequenceMaker(tokenizer, seed).sequences(stage), count)


def test_untrained_model_already_looks_for_what_followed() -> None:
    torch.manual_seed(0)
    model = build_model(Shape(layers=2), 500, 0, 1).eval()
    model.set_attn_implementation("eager")
    stretch = torch.randperm(400)[:40] + 2
    ids = torch.cat([stretch, stretch]).unsqueeze(0)
    with torch.no_grad():
        attention = model.model(input_ids=ids, output_attentions=True).attentions
    # Position i of the second copy attends to what followed the same id in the first: i - 39.
    found = attention[1][0, 0].diagonal(-39)[2:40]
    assert found.mean() > 0.5


@pytest.mark.parametrize("stage", [*STAGES, *WIDER], ids=lambda stage: stage.name)
def test_batches_are_seeded_and_mark_the_answers(tokenizer: Any, stage: Stage) -> None:
    batch = next(make_batches(SequenceMaker(tokenizer, 3), stage, 3))
    again = next(make_batches(SequenceMaker(tokenizer, 3), stage, 3))
    np.testing.assert_array_equal(batch.ids, again.ids)
    np.testing.assert_array_equal(batch.targets, again.targets)
    assert batch.ids.shape == (stage.rows, stage.length)
    assert (batch.question >= 0).any()
    # A target is the id that follows its position.
    rows, columns = np.nonzero(batch.positions < stage.length - 1)
    at = batch.positions[rows, columns]
    np.testing.assert_array_equal(batch.ids[rows, at + 1], batch.targets[rows, columns])


def test_answers_are_marked_by_weight(tokenizer: Any) -> None:
    batch = next(make_batches(SequenceMaker(tokenizer, 0), stage_of("recall"), 0))
    first = (batch.question == 0) & (batch.weights > 0)
    text = tokenizer.decode(batch.targets[first])
    value = tokenizer.decode(batch.targets[first & (batch.weights == 3.0)])
    assert text.endswith(".</s>")
    assert value.strip(" .") in text
    assert len(value) < len(text)


def test_bare_facts_told_by_role_stand_under_a_line_that_says_whose_it_is(tokenizer: Any) -> None:
    by_reference = 0
    for sequence in in_order(tokenizer, "roles", 0, 40):
        text = tokenizer.decode(sequence.ids)
        for number, kind in enumerate(sequence.kinds):
            answer = tokenizer.decode(
                [token for token, at in zip(sequence.ids, sequence.question, strict=True) if at == number]
            ).strip()
            context, _ = text.split(answer, 1)
            if KIND_NAMES[kind] == "within":
                continue
            by_reference += 1
            name, role = next(pair for pair in introduced(context) if answer.startswith(pair[0]))
            told = [found.start() for found in re.finditer(rf"The {role}\b(?! is [A-Z])", context)]
            assert told
            first = re.search(rf"{name} is the {role}\.|The {role} is {name}\.", context)
            assert first is not None
            assert first.start() < told[0]
    assert by_reference > 20


def introduced(context: str) -> list[tuple[str, str]]:
    """Names with their roles, as the lines of a sequence say."""
    named = r"([A-Z]\w+(?: [A-Z]\w+)?)"
    pairs = re.findall(named + r" is the (\w+)\.", context)
    return pairs + [(name, role) for role, name in re.findall(r"The (\w+) is " + named + r"\.", context)]


def test_short_run_ends_in_a_model_that_loads_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    monkeypatch.setattr("tests.toy.train.train_tokenizer", lambda: tokenizer)
    stages = (
        Stage("copy", 48, 2, 1e-3, {}),
        Stage("all", 640, 1, 1e-3, {"within": 0.5, "reference": 0.5}, (2,)),
    )
    options = TrainOptions(tmp_path / "model", 0, 1280, 2, False, 0, tmp_path / "state.pt")
    accuracy = Trainer(options, TINY, stages).run()
    assert set(accuracy) <= {"within", "reference"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.num_hidden_layers == 3
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / "model").bos_token_id == 0
    resumed = Trainer(options, TINY, stages)
    assert resumed.stage_index == 2
    assert resumed.tokens == 2 * 2 * 48 + 1280
    started = Trainer(replace(options, checkpoint=None, start=tmp_path / "model"), TINY, stages)
    assert started.stage_index == 1
    exported = model.state_dict()
    assert all(torch.equal(weight.bfloat16(), exported[name]) for name, weight in started.model.state_dict().items())


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_training_goes_on_in_a_deeper_model_or_another_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any, architecture: str
) -> None:
    monkeypatch.setattr("tests.toy.train.train_tokenizer", lambda: tokenizer)
    stages = (Stage("roles", 384, 2, 1e-3, {"within": 1.0}), Stage("all", 384, 1, 1e-3, {"within": 1.0}, (2,)))
    begun = TrainOptions(tmp_path / "begun", compile=False, workers=0)
    Trainer(begun, TINY, stages).export()
    options, shape = read_options(
        [
            *("--start", str(tmp_path / "begun"), "--out", str(tmp_path / "grown"), "--arrange", "0,2,-,1"),
            *("--architecture", architecture, "--begin", "roles", "--steps", "1", "--final-tokens", "384"),
            *("--checkpoint", str(tmp_path / "state.pt"), "--source-layer", "3", "--no-compile"),
        ]
    )
    assert options.guidance == Guidance(owner=4, source=3)  # the tiny model had no layer 4 that could have moved
    options = replace(options, workers=0)
    shape = replace(TINY, layers=shape.layers, architecture=shape.architecture)
    trainer = Trainer(options, shape, stages)
    assert trainer.stage_index == 0
    trainer.run()
    grown = AutoModelForCausalLM.from_pretrained(tmp_path / "grown")
    assert (grown.config.model_type, grown.config.num_hidden_layers) == (architecture, 4)
    assert read_options(["--start", str(tmp_path / "grown")])[0].guidance == options.guidance
    # The checkpoint goes before the weights to start from.
    assert Trainer(options, shape, stages).tokens == trainer.tokens == 2 * 384 + 384


def test_guided_layers_move_with_the_layers() -> None:
    assert Guidance().moved((0, 1, 4, 2, 3, None, 5, 6, None, 7)) == Guidance(owner=2, source=7)
    assert Guidance(2, 7).probed == 3


def test_guided_layers_default_to_where_those_of_the_model_lie(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 8}')
    start = ["--start", str(tmp_path)]
    options, shape = read_options([*start, "--layers", "16"])
    assert (shape.layers, options.guidance) == (16, Guidance(owner=8, source=12))
    assert read_options(start)[0].guidance == Guidance() == read_options([])[0].guidance
    assert read_options(start)[1] == Shape() == read_options([])[1]
    options, _ = read_options([*start, "--layers", "16", "--owner-layer", "6", "--source-layer", "9"])
    assert options.guidance == Guidance(owner=6, source=9)
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 8, "guided_layers": {"owner": 2, "source": 5}}')
    assert read_options([*start, "--arrange", "2,0,1,3,4,5"])[0].guidance == Guidance(owner=0, source=5)
    with pytest.raises(ConfigError, match="layers"):
        read_options([*start, "--layers", "6"])


def test_the_layer_that_is_told_is_the_layer_that_is_guided(tokenizer: Any) -> None:
    torch.manual_seed(0)
    llama = build_model(replace(TINY, kv_heads=2), len(tokenizer), 0, 1)
    model = grow(llama, "qwen3", (0, 1, 2), torch.randint(2, 300, (1, 20)))
    stage = Stage("roles", 384, 1, 1e-3, {"within": 0.5, "reference": 0.5})
    batch = next(make_batches(SequenceMaker(tokenizer, 0), stage, 0))
    named = signature(TrainingLoss.forward).parameters.keys() - {"self"}
    inputs = {name: torch.from_numpy(getattr(batch, name)) for name in named}
    loss, _, _ = TrainingLoss(model, Probes(TINY.hidden), 1.0, Guidance(owner=1, source=2))(**inputs)
    query = model.model.layers[1].self_attn.q_proj.weight
    plain, _, _ = TrainingLoss(model, Probes(TINY.hidden), 1.0, Guidance(owner=7, source=7))(**inputs)
    moved = [torch.autograd.grad(each, query)[0][:32] for each in (loss, plain)]
    assert not torch.allclose(*moved)


def test_model_that_must_begin_with_another_says_so(tmp_path: Path) -> None:
    shape = replace(TINY, architecture="qwen3")
    with pytest.raises(ConfigError, match="start"):
        Trainer(TrainOptions(tmp_path, compile=False, workers=0), shape)


def test_unknown_stage_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    monkeypatch.setattr("tests.toy.train.train_tokenizer", lambda: tokenizer)
    options = TrainOptions(tmp_path, compile=False, workers=0)
    Trainer(options, TINY).export()
    with pytest.raises(ConfigError, match="begin"):
        Trainer(replace(options, start=tmp_path, begin="middle"), TINY)
    with pytest.raises(ConfigError, match="end"):
        Trainer(replace(options, end="middle"), TINY)
    with pytest.raises(ConfigError, match="begin"):
        Trainer(replace(options, start=tmp_path, begin="all", end="compare"), TINY)
    with pytest.raises(ConfigError, match="places"):
        Trainer(replace(options, start=tmp_path, places=(0, 1)), TINY)


def test_weights_of_another_vocabulary_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    other = train_tokenizer(vocab_size=400, towns=1)
    other.save_pretrained(tmp_path)
    monkeypatch.setattr("tests.toy.train.train_tokenizer", lambda: tokenizer)
    with pytest.raises(ConfigError, match="start"):
        Trainer(TrainOptions(tmp_path / "out", compile=False, workers=0, start=tmp_path), TINY)


def test_passages_are_marked_with_whom_they_are_about(tokenizer: Any) -> None:
    (sequence,) = in_order(tokenizer, "reference", 3, 1, passages=(4,))
    named = {tokenizer.decode([label]).strip() for label in sequence.about if label >= 0}
    text = tokenizer.decode(sequence.ids)
    assert len(named) >= 2
    for start in named:
        assert start in text
    # Nobody is written about before anybody was mentioned.
    assert sequence.about[0] == -1


def test_the_probe_learns_and_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    monkeypatch.setattr("tests.toy.train.train_tokenizer", lambda: tokenizer)
    stages = (Stage("roles", 384, 2, 1e-3, {"within": 0.5, "reference": 0.5}, about=1.0),)
    trainer = Trainer(TrainOptions(tmp_path, 0, 768, compile=False, workers=0), TINY, stages)
    before = [weight.clone() for weight in trainer.probes.parameters()]
    trainer.run()
    assert any(not torch.equal(old, new) for old, new in zip(before, trainer.probes.parameters(), strict=True))
    assert not any("probe" in name for name in AutoModelForCausalLM.from_pretrained(tmp_path).state_dict())


@pytest.mark.parametrize("name", ["recall", "roles", "reference"])
def test_values_are_looked_for_where_they_are_told(tokenizer: Any, name: str) -> None:
    found = 0
    for sequence in in_order(tokenizer, name, 1, 20):
        for at, start, end in sequence.sources:
            assert start < end <= at
            found += 1
            # What the answer must say next is what stands at the place it should look at.
            assert tokenizer.decode(sequence.ids[at + 1]).strip() == tokenizer.decode(sequence.ids[start]).strip()
        for at, start, end in sequence.rests:
            assert end == start + 1
            assert sequence.ids[at + 1] == sequence.ids[start]
    assert found > 20


def test_every_value_that_an_answer_names_is_looked_for(tokenizer: Any) -> None:
    town = build_town(4, "train")
    kinds = set()
    for question in ask_all(town):
        answer = tokenizer.backend_tokenizer.encode(f" {question.sentence}", add_special_tokens=False)
        named = values_named(question, answer)
        kinds.add((question.kind, len(named)))
        for fact, ids in named.items():
            assert tokenizer.decode(answer.ids[ids.start : ids.stop]).strip(" ,.") == fact.value
    assert kinds >= {("reference", 1), ("bridge", 2), ("comparison", 2)}


def test_bare_comparisons_follow_from_the_numbers_before_them(tokenizer: Any) -> None:
    fact = r"(\S+(?: [^\s,.?]+)?) (?:was|received|employs|has a|draws) [^\d,.?]*(\d+)[^\d,.?]*"
    form = re.compile(rf"{fact} and {fact}, so (.+?) (is older|is younger|is larger|has the larger school)\.</s>")
    verdicts = set()
    for sequence in in_order(tokenizer, "all", 1, 6, bare_comparisons=1.0):
        found = form.findall(tokenizer.decode(sequence.ids))
        assert len(found) > 10
        for first, low, second, high, best, verdict in found:
            verdicts.add((verdict, int(low) < int(high)))
            wanted = min if verdict == "is older" else max
            name = wanted(((int(low), first), (int(high), second)))[1]
            assert name.endswith(best) or best.endswith(name)
        counted = [at for at, weight in enumerate(sequence.weights) if weight >= ANSWER_WEIGHT]
        said = tokenizer.decode([sequence.ids[at] for at in counted])
        # Numbers cannot be predicted, and nothing is asked of them.
        assert not any(letter.isdigit() for letter in said)
        assert said.count(" so ") >= len(found)
    assert len(verdicts) == 8


def test_numbers_have_sizes_where_they_end(tokenizer: Any) -> None:
    maker = SequenceMaker(tokenizer, 1)
    text = "In 1800 it had 12 halls, in 1989 980, 7 and 2025 of no kind"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    numbers = maker.numbers_in(ids)
    assert sorted(numbers.values()) == [7, 12, 980, 1800, 1989, 2025]
    for at, number in numbers.items():
        assert tokenizer.decode(ids[: at + 1]).endswith(str(number))
    stage = Stage("all", 640, 2, 1e-3, {"within": 1.0}, (2,), bare_comparisons=1.0)
    batch = next(make_batches(maker, stage, 0))
    kinds = ~np.isnan(batch.sizes)
    assert kinds.any(axis=(0, 1)).all(), "years and others"
    assert kinds.sum(axis=-1).max() == 1
    assert batch.sizes[kinds].min() >= 0
    assert batch.sizes[kinds].max() <= 1
    for row, at, kind in zip(*np.nonzero(kinds), strict=True):
        low, high = (1800, 1989) if kind == 0 else (12, 980)
        number = round(low + float(batch.sizes[row, at, kind]) * (high - low))
        position = batch.number_positions[row, at]
        assert tokenizer.decode(batch.ids[row, : position + 1]).endswith(str(number))


@pytest.mark.parametrize("bare", [0.0, 1.0])
def test_comparisons_look_at_both_numbers_and_at_the_name_they_come_to(tokenizer: Any, bare: float) -> None:
    found = 0
    for sequence in in_order(tokenizer, "all", 2, 4, bare_comparisons=bare):
        text = [tokenizer.decode(sequence.ids[: at + 1]) for at in range(len(sequence.ids))]
        for (at, first, _), (same, second, _) in zip(sequence.firsts, sequence.seconds, strict=True):
            assert at == same
            assert text[at].endswith(", so")
            sentence = re.split(r"[?:] |\n", text[at])[-1]
            told = re.findall(r"\d+", sentence)
            assert [re.findall(r"\d+", text[end])[-1] for end in (first, second)] == told
            (name,) = [look for look in sequence.sources if look[0] == at]
            assert sequence.ids[at + 1] == sequence.ids[name[1]]
            assert first - 40 < name[1] < at
            found += 1
    assert found > 10


@pytest.mark.parametrize("name", ["roles", "reference"])
def test_roles_are_looked_up_where_their_owners_are_introduced(tokenizer: Any, name: str) -> None:
    found = 0
    for sequence in in_order(tokenizer, name, 1, 20):
        for at, start, end in sequence.owners:
            assert start < end <= at
            found += 1
            # Whoever is written about here was written about there.
            assert sequence.about[at] in sequence.about[start:end]
    assert found > 20


def test_description_is_looked_up_where_the_other_tells_it(tokenizer: Any) -> None:
    found = 0
    for sequence in in_order(tokenizer, "wide", 2, 12, wide=1.0, bare_comparisons=0.0):
        for at, start, end in sequence.owners:
            assert start < end <= at
            # The name of whoever is written about was told by then, in a passage about another: a description.
            if sequence.about[at] not in sequence.about[start:end]:
                assert sequence.about[at] in sequence.ids[:end]
                text = tokenizer.decode(sequence.ids[max(0, at - 300) : at + 1])
                assert re.search(r"\b[Tt]he (founder|employer|organiser) of [A-Z]", text)
                found += 1
    assert found > 20


def test_the_wider_archive_is_read_at_the_end_alone(tmp_path: Path) -> None:
    options, shape = read_options(["--out", str(tmp_path), "--wide"])
    assert Trainer(options, shape).stages == (*STAGES[:-1], *WIDER)
    options, _ = read_options(["--out", str(tmp_path), "--wide", "--end", "settle"])
    assert [stage.name for stage in Trainer(options, shape).stages][-3:] == ["wide", "long", "settle"]
    assert all(stage.wide for stage in WIDER)
    assert not any(stage.wide for stage in STAGES)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_look_is_measured_on_the_attention_that_the_model_pays(architecture: str) -> None:
    torch.manual_seed(0)
    model = build_model(Shape(layers=2, architecture=architecture), 300, 0, 1).eval()
    for name, weight in model.named_parameters():
        if "_norm" in name:  # a norm that is left out shows only where it weighs channels differently
            torch.nn.init.uniform_(weight, 0.5, 2.0)
    model.set_attn_implementation("eager")
    ids = torch.randint(2, 300, (2, 40))
    looks = torch.tensor([[[20, 3, 9], [39, 0, 40]], [[11, 0, 5], [-1, -1, -1]]])
    with torch.no_grad():
        out = model.model(input_ids=ids, output_hidden_states=True, output_attentions=True)
        loss, found = looking(model.model, out.hidden_states, 1, looks, group=1)
    paid = out.attentions[1][:, 2]  # four heads, two to a group
    masses = torch.stack([paid[0, 20, 3:9].sum(), paid[0, 39].sum(), paid[1, 11, 0:5].sum()])
    torch.testing.assert_close(loss, -masses.log().mean())
    tops = [3 <= int(paid[0, 20].argmax()) < 9, True, int(paid[1, 11].argmax()) < 5]
    assert float(found) == pytest.approx(sum(tops) / 3)
    with torch.no_grad():
        assert [float(each) for each in looking(model.model, out.hidden_states, 2, looks)] == [0.0, 0.0]
