"""CacheBlendMiddleware, and what is said where LangChain's agents are not installed."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.messages.tool import tool_call

import cacheblend_rag.langchain as ours
from cacheblend_rag.app.cli import main
from cacheblend_rag.errors import MissingExtraError, require
from cacheblend_rag.langchain import CacheBlendMiddleware, ChatCacheBlend, known_chunks, tracking_off
from cacheblend_rag.retrieval.splitting import split
from tests.integrations.langchain.models import Ended, FixedRetriever, passages, tiny_engine

DOCUMENTS = passages(3, seed=8)
_MISSING = (("langchain", "langchain_core"), ("llama_index", "llama_index.core"), ("retrieval", "faiss"))
TEXTS = [one.page_content for one in DOCUMENTS]


@pytest.fixture
def chat() -> Iterator[ChatCacheBlend]:
    known_chunks.clear()
    with tiny_engine() as engine:
        yield ChatCacheBlend.from_engine(engine, max_new_tokens=2, report_input_ids=True)


async def test_retrieved_documents_stand_behind_the_system_prompt(chat: ChatCacheBlend) -> None:
    chat.warm(DOCUMENTS, progress=False)
    known_chunks.clear()
    ended = Ended()
    middleware = CacheBlendMiddleware(FixedRetriever(documents=DOCUMENTS), instructions="Use these.")
    agent = create_agent(chat, [], system_prompt="Be short.", middleware=[middleware])
    asked: Any = {"messages": [HumanMessage("What fell?")]}
    with tracking_off():  # the middleware makes them known by itself
        agent.invoke(asked, {"callbacks": [ended]})
        await agent.ainvoke(asked, {"callbacks": [ended]})
    for info in ended.infos:
        assert (info["hits"], info["misses"]) == (3, 0)
        text = chat.engine.tokenizer.decode(info["input_ids"])
        assert "[system] Be short.\n\nUse these." in text
        assert text.index("Use these.") < text.index(TEXTS[0]) < text.index("What fell?")


@pytest.mark.parametrize("whole", [False, True])
def test_answers_of_tools_are_made_known(chat: ChatCacheBlend, whole: bool) -> None:
    turns = [
        HumanMessage("What fell?"),
        AIMessage("", tool_calls=[tool_call(name="find", args={}, id="1"), tool_call(name="find", args={}, id="2")]),
        ToolMessage("\n\n".join(TEXTS[:2]), tool_call_id="1", artifact=DOCUMENTS[:2]),
        ToolMessage(TEXTS[2], tool_call_id="2", artifact={"not": "documents"}),
    ]
    agent = create_agent(chat, [], middleware=[CacheBlendMiddleware(tool_answers=whole)])
    ended = Ended()
    agent.invoke({"messages": turns}, {"callbacks": [ended]})
    assert [text in known_chunks for text in TEXTS] == [True, True, whole]
    assert ended.infos[0]["misses"] == 2 + whole


def test_missing_package_is_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("langchain.agents.middleware", "langchain_text_splitters"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "cacheblend_rag.langchain.middleware")
    with pytest.raises(MissingExtraError, match=r"pip install 'cacheblend-rag\[agents\]'"):
        ours.__getattr__("CacheBlendMiddleware")
    with pytest.raises(MissingExtraError, match=r"pip install 'cacheblend-rag\[langchain\]'"):
        split([])
    for missing in ("tests.none", "no_such.core"):  # what is left of a package, or no package
        with pytest.raises(MissingExtraError, match=missing):
            require("llama-index", missing)
    for room, module in _MISSING:
        monkeypatch.delitem(sys.modules, f"cacheblend_rag.{room}", raising=False)
        monkeypatch.setattr("cacheblend_rag.errors.find_spec", lambda name, missing=module: name != missing or None)
        with pytest.raises(MissingExtraError, match=rf"{module}.*'cacheblend-rag\[{room.replace('_', '-')}\]'"):
            importlib.import_module(f"cacheblend_rag.{room}")
    assert main(["ask", "What fell?"]) == 2
    assert "pip install 'cacheblend-rag[app]'" in capsys.readouterr().err


def test_frameworks_come_with_the_extras_that_the_readme_installs() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    frameworks = ("langchain", "llama-index", "sentence-transformers", "faiss")
    assert [one for one in project["dependencies"] if one.startswith(frameworks)] == []
    assert "cacheblend-rag[retrieval,llama-cpp,llama-index]" in project["optional-dependencies"]["app"]


def test_import_needs_langchain_core_alone() -> None:
    for path in Path(ours.__file__).parent.glob("*.py"):
        imports = re.findall(r"^(?:from|import) (lang\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(imports) <= {"langchain_core"}, path
