"""Arguments that users of other packages give: they work here, or the error names what to use in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_index.core.prompts import PromptTemplate

from cacheblend_rag import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.langchain import CacheBlendLLM, ChatCacheBlend, HuggingFaceEmbeddings
from cacheblend_rag.llama_index import CacheBlendLLM as LlamaIndexLLM
from cacheblend_rag.llama_index.embedding import HuggingFaceEmbedding
from tests.integrations.langchain.models import tiny_engine, tiny_parts
from tests.integrations.retrieval.conftest import static_model

KINDS = [CacheBlendLLM, ChatCacheBlend, LlamaIndexLLM]
QUICK: Any = {"check_model": False, "min_tokens": 0, "write_back": "inline"}
# Each argument with a value, and a word of the remedy; without one it works.
OLLAMA = {
    "validate_model_on_init": (True, ""),
    "mirostat": (2, "min_p"),
    "mirostat_eta": (0.1, "min_p"),
    "mirostat_tau": (5.0, "min_p"),
    "num_ctx": (4096, "drop_chunks"),
    "num_gpu": (1, "use device"),
    "num_thread": (4, "torch.set_num_threads"),
    "num_predict": (64, "use max_new_tokens"),
    "repeat_last_n": (64, "repetition_penalty"),
    "repeat_penalty": (1.1, "use repetition_penalty"),
    "temperature": (0.5, ""),
    "seed": (1, ""),
    "logprobs": (True, ""),
    "stop": (["x"], ""),
    "tfs_z": (2.0, "min_p"),
    "format": ("json", "response_format"),
    "keep_alive": ("5m", "delete both"),
    "base_url": ("http://localhost:11434", "init_chat_model"),
    "client_kwargs": ({"timeout": 3}, "in this process"),
    "async_client_kwargs": ({"timeout": 3}, "in this process"),
    "sync_client_kwargs": ({"timeout": 3}, "in this process"),
}
OLLAMA_OF_LLAMA_INDEX = {
    "request_timeout": (60.0, "use timeout"),
    "prompt_key": ("prompt", ""),
    "additional_kwargs": ({"seed": 3, "no_repeat_ngram_size": 2}, ""),
    "client": (object(), "in this process"),
    "async_client": (object(), "in this process"),
    "headers": ({"a": "b"}, "in this process"),
}
HUGGING_FACE = {
    "task": ("text-generation", ""),
    "backend": ("openvino", "PyTorch"),
    "device": (-1, ""),
    "device_map": ("auto", "model_kwargs"),
    "model_kwargs": ({}, ""),
    "pipeline_kwargs": ({"max_new_tokens": 8, "no_repeat_ngram_size": 2, "return_full_text": False}, ""),
    "batch_size": (4, "max_concurrent"),
    "llm": (object(), "from_pipeline"),
    "pipeline": (object(), "from_pipeline"),
    "tokenizer": (object(), "from_model"),
    "presence_penalty": (0.5, ""),
    "frequency_penalty": (0.5, ""),
    "logit_bias": ({5: 1}, ""),
    "streaming": (True, ""),
    "stream_usage": (True, ""),
    "n": (1, ""),
    "max_tokens": (8, ""),
    "max_length": (64, "use max_new_tokens"),
    "repo_id": ("a/b", "use model_id"),
    "endpoint_url": ("http://localhost", "init_chat_model"),
    "inference_server_url": ("http://localhost", "init_chat_model"),
    "huggingfacehub_api_token": ("hf_x", "model_kwargs"),
    "provider": ("auto", "in this process"),
    "server_kwargs": ({"a": 1}, "in this process"),
    "return_full_text": (False, ""),
    "truncate": (100, "drop_chunks"),
    "stop_sequences": (["x"], "use stop"),
    "watermark": (True, "watermark"),
    "repetition_penalty": (1.1, ""),
    "do_sample": (False, ""),
}
HUGGING_FACE_OF_LLAMA_INDEX = {
    "context_window": (4096, "drop_chunks"),
    "max_new_tokens": (8, ""),
    "system_prompt": ("Be brief.", "system message"),
    "query_wrapper_prompt": (PromptTemplate("{query_str}"), "prompt template"),
    "tokenizer_name": ("another/tokenizer", "from_model"),
    "stopping_ids": ([7], "eos_token_id"),
    "tokenizer_outputs_to_remove": (["token_type_ids"], "from_model"),
    "tokenizer_kwargs": ({"max_length": 4096}, "from_model"),
    "generate_kwargs": ({"temperature": 0.7, "top_k": 50, "top_p": 0.95, "do_sample": True}, ""),
}
OTHERS = OLLAMA | OLLAMA_OF_LLAMA_INDEX | HUGGING_FACE | HUGGING_FACE_OF_LLAMA_INDEX
# Fields that LlamaIndex's own base has.
OF_LLAMA_INDEX = ("context_window", "system_prompt", "query_wrapper_prompt")


@pytest.fixture(scope="module")
def engine() -> BlendEngine:
    return tiny_engine()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    for part in tiny_parts():
        part.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("kind", KINDS)
def test_argument_works_or_its_error_names_the_right_one(kind: Any, name: str, engine: BlendEngine) -> None:
    value, remedy = OTHERS[name]
    works = not remedy or (kind is LlamaIndexLLM and name in OF_LLAMA_INDEX)
    loads = {"device", "model_kwargs"}  # of an engine that is made here
    if works and name not in loads:
        assert kind.from_engine(engine, **{name: value})
    elif not works:
        with pytest.raises(ConfigError, match=f"^{name}=.*{remedy}") as caught:
            kind.from_engine(engine, **{name: value})
        assert "there is no such option" not in str(caught.value)


def test_models_that_stay_are_what_keep_alive_asks_for(engine: BlendEngine) -> None:
    for kind in KINDS:
        assert kind.from_engine(engine, keep_alive=-1)


@pytest.mark.parametrize("kind", KINDS)
def test_model_is_loaded_by_the_name_that_others_give_it(kind: Any, saved: Path) -> None:
    name = str(saved)
    expected = kind.from_model_id(name, **QUICK)
    for given in (
        {"model": name},
        {"model": saved},
        {"model_name": name},
        {"model_name": name, "tokenizer_name": name},
        {"model": name, "model_id": name},
    ):
        made = kind(**given, **QUICK)
        assert (made.model_id, made.model_name) == (name, name)
        assert made.engine.fingerprint == expected.engine.fingerprint
    shown = kind(model=name, model_name="mine", **QUICK)
    assert (shown.model_id, shown.model_name) == (name, "mine")
    with pytest.raises(ConfigError, match=r"^model='another' .*model_id=.* is given, too"):
        kind(model="another", model_id=name, **QUICK)
    with pytest.raises(ConfigError, match=r"^tokenizer_name='another' .*from_model"):
        kind(model_name=name, tokenizer_name="another", **QUICK)
    with pytest.raises(ConfigError, match="from_model for a model with its tokenizer"):
        kind(model=tiny_parts()[0], **QUICK)


def test_embeddings_have_the_name_and_the_arguments_that_they_have_elsewhere(tmp_path: Path) -> None:
    model = static_model()
    model.save(str(tmp_path))
    texts = ["the old mill", "river"]
    normal = {"normalize_embeddings": True, "batch_size": 1}
    embedder = HuggingFaceEmbeddings(model_name=str(tmp_path), model_kwargs={"device": "cpu"}, encode_kwargs=normal)
    expected = model.encode(texts, normalize_embeddings=True)
    np.testing.assert_array_equal(np.array(embedder.embed_documents(texts), np.float32), expected)
    np.testing.assert_array_equal(np.array(embedder.embed_query(texts[0]), np.float32), expected[0])
    apart = HuggingFaceEmbeddings(model, encode_kwargs=normal, query_encode_kwargs={})
    np.testing.assert_array_equal(np.array(apart.embed_query(texts[0]), np.float32), model.encode(texts[0]))
    nodes = HuggingFaceEmbedding(model_name=str(tmp_path), embed_batch_size=3, device="cpu")
    assert (nodes.model_name, nodes.embed_batch_size) == (str(tmp_path), 3)
    np.testing.assert_array_equal(np.array(nodes.get_text_embedding(texts[0]), np.float32), model.encode(texts[0]))


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({}, "name one"),
        ({"model": "a", "model_name": "a"}, "name one"),
        ({"model": "a", "multi_process": True}, "in this process"),
        ({"model": "a", "cache_folder": "b"}, "model_kwargs"),
        ({"model": "a", "batch_sise": 3}, "did you mean 'batch_size'"),
        ({"model": static_model(), "model_kwargs": {"trust_remote_code": True}}, "^trust_remote_code=True .*loaded"),
    ],
)
def test_arguments_of_embeddings_that_do_not_go_are_refused(given: Any, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        HuggingFaceEmbeddings(**given)
