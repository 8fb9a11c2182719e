"""Models of LangChain and LlamaIndex as objects: strict about what they are given, copied, pickled, shown, counted."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.load import dumps, loads
from llama_index.core.schema import TextNode

from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.engine.decode import DecodeFields
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.langchain import CacheBlendLLM, ChatCacheBlend, known_chunks
from cacheblend_rag.llama_index import CacheBlendLLM as LlamaIndexLLM
from tests import tiny
from tests.engine.test_options import OPTIONS, OTHERS
from tests.integrations.langchain.models import passages, tiny_engine, tiny_parts
from tests.integrations.llama_index.common import make_index, make_llm, make_nodes

KINDS = [CacheBlendLLM, ChatCacheBlend, LlamaIndexLLM]
QUICK: Any = {"min_tokens": 0, "write_back": "inline"}


@pytest.fixture(scope="module")
def engine() -> Iterator[BlendEngine]:
    with tiny_engine(recompute_ratio=1.0) as made:
        yield made


def say(llm: Any, asked: str = "What fell?", **options: Any) -> str:
    """A whole answer's text."""
    if isinstance(llm, LlamaIndexLLM):
        return str(llm.complete(asked, **options).text)
    answer = llm.invoke(asked, **options)
    return str(getattr(answer, "content", answer))


# Strict arguments ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_model_has_the_options_of_decoding_as_they_are_declared(kind: Any) -> None:
    for name, declared in DecodeFields.model_fields.items():
        found = kind.model_fields[name]
        assert (found.annotation, found.metadata, found.description) == (
            declared.annotation,
            declared.metadata,
            declared.description,
        )
        assert found.get_default(call_default_factory=True) == declared.get_default(call_default_factory=True)
    assert "grammar" not in kind.model_fields, "a grammar comes with each request"
    both = {"verify"}  # for all answers of an engine, or for those of one model or call
    assert set(kind.model_fields) & set(OPTIONS) == both, "options of the engine are those of its config"


def test_unknown_fields_are_refused_with_the_nearest_name(engine: BlendEngine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_new_token=3 .*did you mean 'max_new_tokens'"):
        CacheBlendLLM.from_model_id(tmp_path / "no model is loaded", recompute_ratio=0.9, max_new_token=3)
    with pytest.raises(ConfigError, match="did you mean 'recompute_ratio'"):
        CacheBlendLLM.from_model_id(tmp_path, recompute_ration=0.9)
    with pytest.raises(ConfigError, match="temprature"):
        CacheBlendLLM(engine=engine, temprature=1.0)
    with pytest.raises(ConfigError, match="give it in model_kwargs"):
        CacheBlendLLM.from_model_id(tmp_path, device_map="auto")
    with pytest.raises(ConfigError, match=r"contxts=2 .*there is no such option"):
        CacheBlendLLM.from_model_id(tmp_path, blend={"contxts": 2})


def test_model_is_loaded_by_the_arguments_that_transformers_takes(saved: Path) -> None:
    given: list[tuple[Any, dict[str, Any]]] = [
        (CacheBlendLLM, {"dtype": torch.bfloat16, "device": torch.device("cpu"), "task": "text-generation"}),
        (ChatCacheBlend, {"model_kwargs": {"torch_dtype": torch.bfloat16, "device": torch.device("cpu")}}),
        (LlamaIndexLLM, {"dtype": "bfloat16", "model_kwargs": {"dtype": torch.bfloat16}, "device": -1}),
    ]
    for kind, options in given:
        model = kind.from_model_id(saved, **QUICK, **options)
        assert model.engine.model.dtype == torch.bfloat16
        again = pickle.loads(pickle.dumps(model))
        assert (again.device, again.dtype) == (model.device, "bfloat16")


def test_arguments_that_do_not_go_are_refused_with_a_remedy(saved: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"model_kwargs": {"dtype": "float16"}, "dtype": "bfloat16"}, "dtype='bfloat16' is given, too"),
        ({"model_kwargs": {"device_map": "cpu"}, "device": "cpu"}, "leave out device_map"),
        ({"model_kwargs": {"sliding": 3}}, "sliding=3 .*does not take it"),
        ({"model_kwargs": {"temperature": 0.5}}, "outside model_kwargs"),
        ({"model_kwargs": {"load_in_4bit": True}}, r"BitsAndBytesConfig\(load_in_4bit=True\)"),
        ({"model_kwargs": "bfloat16"}, "use a dict"),
        ({"dtype": torch.int8}, "'int8' .*use one of 'auto'"),
        ({"device": 97}, "cuda:97.*use"),
        ({"model_kwargs": {"quantization_config": {"a": 1}}}, "^quantization_config={'a': 1} .*quant_method"),
        ({"config": {"recompute_ratio": 0.2}}, r"BlendConfig\(recompute_ratio=0.2\)"),
        ({"blend": 3}, "^blend=3 .*use a dict"),
        ({"generate_kwargs": 3}, "^generate_kwargs=3 .*use a dict"),
        ({"num_ctx": 4096}, "drop_chunks"),
    ]
    for number, (given, remedy) in enumerate(refused):
        with pytest.raises(ConfigError, match=remedy):
            KINDS[number % 3].from_model_id(saved, **QUICK, **given)


def test_half_a_character_is_named_and_fails_no_other_text(
    engine: BlendEngine, caplog: pytest.LogCaptureFixture
) -> None:
    model, cut, good = CacheBlendLLM(engine=engine, max_new_tokens=2), tiny.text(20, 81) + "\ud83d", tiny.text(20, 82)
    for answering in (engine, engine.with_config(max_concurrent=2)):
        with pytest.raises(PromptError, match=r"U\+D83D, at character \d+ behind '.*leave it out"):
            say(CacheBlendLLM(engine=answering, max_new_tokens=2), cut)
    assert model.warm([cut, good], progress=False).computed == 1
    assert "a chunk has no KV: the text holds half of a surrogate pair" in caplog.text
    assert model.estimate_bytes([cut, good]) > 0
    assert model.forget([cut, good]) == 1


def test_last_of_two_lengths_counts(engine: BlendEngine) -> None:
    """A call's own is behind what `bind` has bound, whatever the names of both are."""
    made = CacheBlendLLM(engine=engine, max_tokens=3, max_new_tokens=4)
    assert made.max_new_tokens == 4
    assert generated(made) == 4
    for given in ({"max_new_tokens": 2, "max_tokens": 5}, {"max_tokens": 2, "max_new_tokens": 5},
                  {"max_new_tokens": 5, "max_tokens": None}, {"pipeline_kwargs": {"max_tokens": 5}}):  # fmt: skip
        assert generated(made, **given) == 5
    with pytest.raises(ConfigError, match="leave 'max_new_tokens' out; 'max_tokens' is given beside"):
        generated(made, max_tokens=2, pipeline_kwargs={"max_new_tokens": 5})
    for bound, given in (("max_tokens", "max_new_tokens"), ("max_new_tokens", "max_tokens")):
        model = made.bind(stop=["zzz"]).bind(**{bound: 2})
        model.invoke("What fell?", **{given: 5})
        assert made.last_report.generated_tokens == 5
        assert made._get_ls_params(**{bound: 2, given: 5})["ls_max_tokens"] == 5


def generated(model: Any, **options: Any) -> int:
    say(model, **options)
    return int(model.last_report.generated_tokens)


def test_one_text_that_ends_an_answer_is_no_list_of_letters(engine: BlendEngine) -> None:
    whole = say(CacheBlendLLM(engine=engine, max_new_tokens=12))
    word = whole[4:8]
    expected = whole[: whole.index(word)]
    plain = CacheBlendLLM(engine=engine, max_new_tokens=12)
    assert say(CacheBlendLLM(engine=engine, max_new_tokens=12, stop=word)) == expected
    assert say(CacheBlendLLM(engine=engine, max_new_tokens=12, pipeline_kwargs={"stop": word})) == expected
    assert say(plain, stop=word) == say(plain, stop=(word,)) == say(plain, pipeline_kwargs={"stop": word}) == expected
    assert say(CacheBlendLLM(engine=engine, max_new_tokens=12, stop=None), stop=None) == whole
    assert say(plain.model_copy(update={"stop": word})) == expected
    assert say(plain.bind(stop=word)) == expected
    assert plain._get_ls_params(stop=word)["ls_stop"] == [word]


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_call_options_are_refused_with_the_nearest_name(kind: Any, engine: BlendEngine) -> None:
    model = kind(engine=engine, max_new_tokens=2)
    with pytest.raises(ConfigError, match=r"do_samle=True .*did you mean 'do_sample'"):
        say(model, do_samle=True)
    with pytest.raises(ConfigError, match=r"n=2 .*one answer"):
        say(model, n=2)
    with pytest.raises(ConfigError, match="recompute_ratio"):
        say(model, recompute_ratio=0.5)
    with pytest.raises(ConfigError, match="loaded as"):
        say(model, model="another")
    assert say(model, n=1, timeout=60, model=model.model_name) == say(model)
    if kind is not LlamaIndexLLM:
        assert list(model.stream("What fell?", stream_usage=True))
        with pytest.raises(ConfigError, match="do_sample"):
            list(model.stream("What fell?", do_samle=True))
    else:
        with pytest.raises(ConfigError, match="tools"):
            model.complete("What fell?", tools=[])


# Blend options one by one -------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
def test_response_caches_and_serialised_forms_know_every_option(
    engine: BlendEngine, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, other, opened = engine.with_config(), engine.with_config(), list[BlendConfig]()

    def reopen(model: str, *, config: BlendConfig, **_: Any) -> BlendEngine:
        opened.append(config)
        return other

    usual.config = BlendConfig()
    first = ChatCacheBlend(engine=usual)
    for name in OPTIONS:
        other.config = BlendConfig(**{name: OTHERS[name]})
        second = ChatCacheBlend(engine=other)
        assert first.asdict() != second.asdict(), name
        assert first._get_llm_string() != second._get_llm_string(), name
    other.config = BlendConfig(**{name: OTHERS[name] for name in OPTIONS if name not in ("selection", "verify")})
    second = ChatCacheBlend(engine=other)
    second.model_id = str(saved)
    monkeypatch.setattr(BlendEngine, "from_pretrained", reopen)
    again = loads(dumps(second), allowed_objects=[ChatCacheBlend], valid_namespaces=["cacheblend_rag"])
    assert opened == [other.config]
    assert again.asdict() == second.asdict()


# Copies, pickles, repr ----------------------------------------------------------------------


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize(("kind", "again"), [(CacheBlendLLM, copy.deepcopy), (LlamaIndexLLM, pickled)])
def test_copies_and_pickles_open_the_engine_anew(
    kind: Any, again: Callable[[Any], Any], saved: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="from_model_id"), tiny_engine() as engine:
        again(kind(engine=engine))
    model = kind.from_model_id(
        saved, store=tmp_path / "kv", recompute_ratio=0.3, max_new_tokens=5, stop=["zzz"], **QUICK
    )
    documents = passages(2, seed=31)
    texts = [document.page_content for document in documents]
    nodes = [TextNode(text=one) for one in texts] if kind is LlamaIndexLLM else texts
    assert model.warm(nodes, progress=False).computed == 2
    asked = "\n\n".join([*texts, "What fell?"])
    expected = say(model, asked)
    other = again(model)
    assert other.engine is not model.engine
    assert other.engine.model is not model.engine.model
    assert other.engine.config == model.engine.config
    assert (other.max_new_tokens, other.stop, other.model_name) == (5, ["zzz"], model.model_name)
    assert other.stats().requests == 0
    assert say(other, asked) == expected
    assert other.last_report.hits == 2
    view = again(model.engine.with_config(recompute_ratio=0.9))
    assert view.config.recompute_ratio == 0.9
    for one in (model.engine, other.engine, view):
        one.close()


# Counts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_stats_and_last_report(kind: Any) -> None:
    texts = [document.page_content for document in passages(3, seed=41)]
    known_chunks.add(texts)
    with tiny_engine(recompute_ratio=0.3) as engine:
        model = kind(engine=engine, max_new_tokens=2)
        assert model.last_report is None
        assert model.stats().requests == 0
        asked = "\n\n".join([*texts, "What fell?"])
        for expected in ((0, 3), (3, 0)):
            say(model, asked)
            assert (model.last_report.hits, model.last_report.misses) == expected
        reused = model.last_report.reused_tokens
        list(model.stream_complete("Nothing known.") if kind is LlamaIndexLLM else model.stream("Nothing known."))
        assert model.last_report.hits == 0
        seen = model.stats()
        assert (seen.requests, seen.matched, seen.hits, seen.misses) == (3, 2, 3, 3)
        assert seen.reused_tokens == reused > 0


def test_each_thread_has_its_own_last_report(engine: BlendEngine) -> None:
    model = CacheBlendLLM(engine=engine, max_new_tokens=1)
    seen: dict[str, Any] = {}
    begin = threading.Barrier(4)

    def ask(number: int) -> None:
        begin.wait(30)
        asked = "What fell? " * (number + 1)
        for _ in range(3):
            say(model, asked)
            seen.setdefault(asked, set()).add(model.last_report.prompt_tokens)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))
    assert model.stats().requests == 12
    assert model.last_report is None
    assert sorted(map(len, seen.values())) == [1, 1, 1, 1]
    assert len(set.union(*seen.values())) == 4


@pytest.mark.parametrize("mode", ["refine", "astream"])
async def test_llama_index_responses_say_what_was_reused(mode: str) -> None:
    nodes = make_nodes(3, seed=51)
    index = make_index(nodes)
    llm = make_llm(config={"recompute_ratio": 0.3})
    settings: Any = {"streaming": True} if "stream" in mode else {}
    if mode == "refine":
        settings["response_mode"] = mode
    query = index.as_query_engine(llm=llm, similarity_top_k=3, **settings)
    for turn in range(2):
        before = llm.stats()
        response = await query.aquery("What fell?") if mode.startswith("a") else query.query("What fell?")
        if mode == "astream":
            assert "".join([piece async for piece in response.async_response_gen()])
        sums, after = response.metadata["cacheblend"], llm.stats()
        assert sums["answers"] == after.requests - before.requests == (3 if mode == "refine" else 1)
        assert sums["hits"] == after.hits - before.hits
        assert sums["misses"] == after.misses - before.misses
        assert sums["reused_tokens"] == after.reused_tokens - before.reused_tokens
        if turn:
            assert (sums["hits"], sums["misses"]) == (3, 0)
        assert all(node.node_id in response.metadata for node in nodes)
    sums = dict(response.metadata["cacheblend"])
    llm.complete("Another question, outside of any synthesizer?")
    assert response.metadata["cacheblend"] == sums
    llm.engine.close()


# Models and tokenizers that are none --------------------------------------------------------


@pytest.mark.parametrize("kind", [LlamaIndexLLM, None])
def test_wrong_objects_get_a_sentence(kind: Any) -> None:
    model, tokenizer = tiny_parts()
    make = BlendEngine if kind is None else kind.from_model
    with pytest.raises(ConfigError, match=r"tokenizer=None .*AutoTokenizer"):
        make(model, None)
    with pytest.raises(ConfigError, match="model first and its tokenizer second"):
        make(tokenizer, model)
    with pytest.raises(ConfigError, match="from_pretrained"):
        make("a/name", tokenizer)
    with pytest.raises(ConfigError, match="tokenizer='dict'"):
        make(model, {})
    with pytest.raises(ConfigError, match=r"config={'recompute_ratio': 0.2} .*BlendConfig\(recompute_ratio=0.2\)"):
        make(model, tokenizer, config={"recompute_ratio": 0.2})
    if kind is None:
        with pytest.raises(ConfigError, match=r"config=0.2 .*BlendConfig"):
            BlendEngine.from_pretrained("no model is looked for", config=0.2)
    if kind is not None:
        with pytest.raises(ConfigError, match=r"config={}.*BlendConfig"):
            kind.from_model(model, tokenizer, config={}, recompute_ratio=0.2)
        with pytest.raises(ConfigError, match="use from_model"):
            kind.from_model_id(model)
        with pytest.raises(ConfigError, match="use from_model"):
            kind.from_engine(model)
        with pytest.raises(ConfigError, match="store"):
            kind.from_model_id("name", store=object())
