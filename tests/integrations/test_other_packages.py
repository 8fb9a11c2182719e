"""Arguments that users of other packages give: they work here, or the error names what to use in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llama_index.core.prompts import PromptTemplate

from cacheblend_rag import BlendEngine
from cacheblend_rag.errors import ConfigError, ModelLoadError
from cacheblend_rag.langchain import CacheBlendLLM, ChatCacheBlend, HuggingFaceEmbeddings
from cacheblend_rag.llama_index import CacheBlendLLM as LlamaIndexLLM
from cacheblend_rag.llama_index.embedding import HuggingFaceEmbedding
from cacheblend_rag.models.model_names import tag_remedy
from tests.integrations.langchain.models import Script, tiny_parts
from tests.integrations.retrieval.conftest import static_model

KINDS = [CacheBlendLLM, ChatCacheBlend, LlamaIndexLLM]
QUICK: Any = {"min_tokens": 0, "write_back": "inline"}
# Arguments of other packages with a value, and a word of the remedy; without one it works.
OTHERS: dict[str, tuple[Any, str]] = {
    **{"num_ctx": (4096, "drop_chunks"), "num_predict": (64, "use max_new_tokens")},
    **{"max_length": (64, "use max_new_tokens"), "repeat_penalty": (1.1, "use repetition_penalty")},
    **{"format": ("json", "response_format"), "keep_alive": ("5m", "leave it out; a GGUF file is mapped")},
    "think": (True, "use reasoning"),
    "base_url": ("http://localhost:11434", "init_chat_model"),
    **{"n": (1, ""), "num_beams": (2, "without beams"), "use_cache": (True, ""), "return_full_text": (False, "")},
    **{"task": ("text-generation", ""), "tokenizer": (object(), "from_model")},
    **{"streaming": (True, ""), "stream_usage": (True, ""), "torch_dtype": ("bfloat16", "use dtype")},
    **{"device_map": ("auto", "model_kwargs"), "model_path": ("m.gguf", "use model"), "n_ctx": (4096, "leave it out")},
    **{"n_batch": (512, "leave it out"), "flash_attn": (True, "leave it out"), "lora": ("a.gguf", "model_kwargs")},
    **{"max_tokens": (8, ""), "seed": (1, ""), "stop": (["x"], ""), "logprobs": (True, ""), "do_sample": (False, "")},
    **{"pipeline_kwargs": ({"max_new_tokens": 8, "no_repeat_ngram_size": 2, "return_full_text": False}, "")},
    **{"generate_kwargs": ({"temperature": 0.7, "top_k": 50, "top_p": 0.95, "do_sample": True}, "")},
    "stop_sequencess": (["x"], "there is no such option"),
    "temprature": (0.5, "did you mean 'temperature'"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_argument_works_or_its_error_names_the_right_one(kind: Any, engine: BlendEngine) -> None:
    for name, (value, remedy) in OTHERS.items():
        if not remedy:
            assert kind.from_engine(engine, **{name: value}), name
            continue
        with pytest.raises(ConfigError, match=f"^{name}=.*{remedy}"):
            kind.from_engine(engine, **{name: value})


# Options of transformers' generation with values that change nothing, as whole configs of it have them.
NEUTRAL: dict[str, Any] = {
    **{"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "no_repeat_ngram_size": 0, "num_beams": 1},
    **{"penalty_alpha": None, "bad_words_ids": None, "min_length": 0, "use_cache": True, "forced_bos_token_id": None},
    **{"stopping_criteria": None, "prefix_allowed_tokens_fn": None, "remove_invalid_values": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_options_of_generation_that_change_nothing_are_taken_everywhere(kind: Any, engine: BlendEngine) -> None:
    plain = kind.from_engine(engine, max_new_tokens=3)
    nested = "pipeline_kwargs" if kind is not LlamaIndexLLM else "generate_kwargs"
    assert kind.from_engine(engine, **NEUTRAL)
    assert kind.from_engine(engine, **{nested: NEUTRAL})
    ask = plain.invoke if kind is not LlamaIndexLLM else plain.complete
    assert str(getattr(ask("What fell?", **NEUTRAL), "text", "")) == str(getattr(ask("What fell?"), "text", ""))


def test_threads_are_those_of_the_process(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[int]()
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    ChatCacheBlend.from_engine(engine)
    assert threads == []
    assert ChatCacheBlend.from_engine(engine, threads=3).threads == 3
    assert threads == [3]
    for wrong in (0, -1, 2.5, True, "many"):
        with pytest.raises(ConfigError, match=r"^threads="):
            ChatCacheBlend.from_engine(engine, threads=wrong)


def test_text_may_wrap_questions_in_llama_index(engine: BlendEngine) -> None:
    asked = list[str]()
    script = Script(tiny_parts()[1], lambda prompt: asked.append(prompt) or "Yes.")
    for template in ("<q>{query_str}</q>", PromptTemplate("<q>{query_str}</q>")):
        llm = LlamaIndexLLM.from_engine(
            engine, query_wrapper_prompt=template, is_chat_model=False, max_new_tokens=4, logits_processor=[script]
        )
        llm.predict(PromptTemplate("What fell?"))
        assert "<q>What fell?</q>" in asked[-1]
    for wrong in ("no place for the question", PromptTemplate("{context}"), 7):
        with pytest.raises(ConfigError, match=r"^query_wrapper_prompt=.*\{query_str\}"):
            LlamaIndexLLM.from_engine(engine, query_wrapper_prompt=wrong)


@pytest.mark.parametrize("tag", ["llama3.2:3b", "qwen2.5:latest", "hf.co/someone/model:Q4_K_M"])
def test_tags_of_ollama_without_a_file_are_answered_with_the_remedy(tag: str) -> None:
    with pytest.raises(
        ModelLoadError, match=rf"Ollama's library, and its file is not here: fetch it by `ollama pull {tag}`"
    ):
        CacheBlendLLM(model=tag)
    assert tag_remedy("meta-llama/Llama-3.2-3B") == tag_remedy(r"C:\models") == ""


def test_model_is_loaded_by_the_name_that_others_give_it(saved: Path) -> None:
    name = str(saved)
    expected = LlamaIndexLLM.from_model_id(name, **QUICK)
    for given in (
        {"model": name},
        {"model": saved},
        {"model_name": name},
        {"model_name": name, "tokenizer_name": name},
        {"model": name, "model_id": name},
    ):
        made = LlamaIndexLLM(**given, **QUICK)
        assert (made.model_id, made.model_name) == (name, name)
        assert made.engine.fingerprint == expected.engine.fingerprint
    shown = LlamaIndexLLM(model=name, model_name="mine", **QUICK)
    assert (shown.model_id, shown.model_name) == (name, "mine")
    with pytest.raises(ConfigError, match=r"^model='another' .*model_id=.* is given, too"):
        LlamaIndexLLM(model="another", model_id=name, **QUICK)
    with pytest.raises(ConfigError, match=r"^tokenizer_name='another' .*from_model"):
        LlamaIndexLLM(model_name=name, tokenizer_name="another", **QUICK)
    with pytest.raises(ConfigError, match="from_model for a model with its tokenizer"):
        LlamaIndexLLM(model=tiny_parts()[0], **QUICK)


def test_embeddings_have_the_name_and_the_arguments_that_they_have_elsewhere(tmp_path: Path) -> None:
    model = static_model()
    model.save(str(tmp_path))
    texts = ["the old mill", "river"]
    normal = {"normalize_embeddings": True, "batch_size": 1}
    embedder = HuggingFaceEmbeddings(model_name=str(tmp_path), model_kwargs={"device": "cpu"}, encode_kwargs=normal)
    expected = model.encode(texts, normalize_embeddings=True)
    np.testing.assert_array_equal(np.array(embedder.embed_documents(texts), np.float32), expected)
    np.testing.assert_array_equal(np.array(embedder.embed_query(texts[0]), np.float32), expected[0])
    nodes = HuggingFaceEmbedding(model_name=str(tmp_path), embed_batch_size=3, device="cpu")
    assert (nodes.model_name, nodes.embed_batch_size) == (str(tmp_path), 3)
    np.testing.assert_array_equal(np.array(nodes.get_text_embedding(texts[0]), np.float32), model.encode(texts[0]))
