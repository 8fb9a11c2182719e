"""What a framework or the server asks of a store is what the engine's own `generate` asks of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from cacheblend_rag import BlendEngine, Prompt
from cacheblend_rag.app.server.app import create_app
from cacheblend_rag.app.server.services.service import open_service
from cacheblend_rag.langchain import ChatCacheBlend, known_chunks
from cacheblend_rag.llama_index import CacheBlendLLM as LlamaIndexLLM
from cacheblend_rag.store import DiskStore
from tests.app.server.common import BASE, settings_for, settle, write_documents
from tests.integrations.langchain.models import passages, tiny_engine, tiny_parts
from tests.integrations.llama_index.common import make_index, make_nodes
from tests.probes import CountingStore


class Asked:
    """The prompts that engines are asked, by whatever way they come."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.last: tuple[BlendEngine, Prompt] | None = None

        def note(name: str, prompt_of: Callable[[Any], Prompt]) -> None:
            plain = getattr(BlendEngine, name)

            def noted(engine: BlendEngine, given: Any, **options: Any) -> Any:
                self.last = engine, prompt_of(given)
                return plain(engine, given, **options)

            patch.setattr(BlendEngine, name, noted)

        note("generate", lambda prompt: prompt)
        note("stream", lambda prompt: prompt)
        note("stream_batch", lambda prompts: prompts[0])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


def counted(ask: Callable[[], Any], store: CountingStore, engine: BlendEngine) -> tuple[Any, ...]:
    """What an answer costs a store."""
    engine.flush()
    store.forget()
    ask()
    engine.flush()
    return store.counts


def assert_same_calls(ask: Callable[[], object], store: CountingStore, asked: Asked) -> None:
    """A warm request costs a store the same as its prompt given to `generate`."""
    ask()  # stores the prefix
    assert asked.last is not None
    engine, prompt = asked.last
    ours = counted(ask, store, engine)
    assert ours == counted(lambda: engine.generate(prompt, max_new_tokens=4), store, engine)
    assert prompt.chunks
    # All headers are asked for at once.
    ((_, *opened),) = [call for call in store.calls if call[0] == "open_all"]
    assert not [call for call in store.calls if call[0] == "put"]
    assert len(opened) == len(prompt.chunks) + bool(prompt.prefix)
    names = [name for name, *_ in store.calls]
    assert names.count("read_layer") == 0, "layers are read where they belong"
    assert names.count("read_into") == engine.adapter.num_layers * len(opened)
    assert (store.most_held, store.most_open) == (0, len(opened))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CountingStore]:
    with closing(CountingStore(DiskStore(tmp_path / "kv"))) as made:
        yield made


def test_langchain_makes_the_same_store_calls_as_the_engine(store: CountingStore, asked: Asked) -> None:
    documents = passages(3, seed=7)
    known_chunks.add(one.page_content for one in documents)
    stuffed = "Use this:\n" + "\n\n".join(one.page_content for one in documents) + "\n\nWhat fell?"
    with tiny_engine(store=store, prompt_cache=0) as engine:
        llm = ChatCacheBlend.from_engine(engine, max_new_tokens=4)
        llm.warm(documents, progress=False)
        assert_same_calls(lambda: llm.invoke(stuffed), store, asked)


async def test_llama_index_makes_the_same_store_calls_as_the_engine(store: CountingStore, asked: Asked) -> None:
    nodes = make_nodes(3, seed=7)
    with tiny_engine(store=store, prompt_cache=0) as engine:
        llm = LlamaIndexLLM.from_engine(engine, max_new_tokens=4, is_chat_model=True)
        query = make_index(nodes).as_query_engine(llm=llm, similarity_top_k=3)
        # Of a main thread LlamaIndex wants an event loop that it need not make.
        await asyncio.to_thread(query.query, "What fell?")  # stores what is missing
        await asyncio.to_thread(assert_same_calls, lambda: query.query("What fell?"), store, asked)


def test_server_makes_the_same_store_calls_as_the_engine(tmp_path: Path, asked: Asked) -> None:
    for part in tiny_parts():
        part.save_pretrained(tmp_path / "model")
    stores: list[CountingStore] = []

    def counting(inner: Any) -> CountingStore:
        stores.append(CountingStore(inner))
        return stores[-1]

    documents = write_documents(tmp_path / "docs")
    settings = settings_for(tmp_path / "model", documents, tmp_path / "data", prompt_cache=0)
    with TestClient(create_app(settings, open_service(settings, counting)), base_url=BASE) as client:
        settle(client.app.state.service)  # type: ignore[attr-defined]
        (store,) = stores
        question = {"question": "What fell?", "top_k": 3, "stream": False}
        texts = [path.read_text(encoding="utf-8") for path in sorted(documents.glob("*.md"))[:3]]
        completion = {"model": client.get("/v1/models").json()["data"][0]["id"], "max_tokens": 4}
        completion |= {"prompt": "What fell?", "documents": texts}
        chat = {name: value for name, value in completion.items() if name != "prompt"}
        chat["messages"] = [{"role": "user", "content": "What fell?"}]
        for path, body in (("/api/ask", question), ("/v1/completions", completion), ("/v1/chat/completions", chat)):

            def ask(path: str = path, body: dict[str, Any] = body) -> None:
                answer = client.post(path, json=body)
                assert answer.status_code == 200, answer.text

            assert_same_calls(ask, store, asked)
