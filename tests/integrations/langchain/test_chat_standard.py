"""LangChain's own conformance suites for chat models, over a tiny model that wears a chat template.

Skipped by the suites: images, audio and PDF (the models read text), another model by call (a local model is what it
was loaded as), recorded HTTP traffic (there is none).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from syrupy.assertion import SnapshotAssertion

from cacheblend_rag import BlendEngine
from cacheblend_rag.langchain import ChatCacheBlend, known_chunks
from tests.integrations.langchain.models import Script, passages, standard_call, tiny_engine, tiny_parts


@cache
def chat_engine() -> BlendEngine:
    """One engine for all of the suites' tests."""
    return tiny_engine(write_back="inline")


class _Suite:
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatCacheBlend

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "engine": chat_engine(),
            "model_name": "tiny",
            "logits_processor": [Script(tiny_parts()[1], standard_call, free=8)],
        }

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"temperature": 0, "max_tokens": 80, "timeout": 60, "stop": [], "max_retries": 2}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return False


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestChatUnit(_Suite, ChatModelUnitTests):
    """Unit suite."""

    @pytest.mark.xfail(reason="the suite loads only what is on LangChain's own list of partners")
    def test_serdes(self, model: BaseChatModel, snapshot: SnapshotAssertion) -> None:
        """A round trip that names the class to be loaded is in test_models.py."""
        super().test_serdes(model, snapshot)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestChatIntegration(_Suite, ChatModelIntegrationTests):
    """Integration suite."""

    @property
    def supported_usage_metadata_details(self) -> dict[Literal["invoke", "stream"], list[Any]]:
        return {
            "invoke": ["cache_read_input", "cache_creation_input"],
            "stream": ["cache_read_input", "cache_creation_input"],
        }

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatCacheBlend.from_engine(chat_engine(), max_new_tokens=2)
        (document,) = passages(1, seed=90 + stream)
        known_chunks.add([document.page_content])
        messages = [HumanMessage(f"{document.page_content}\n\nWhat fell?")]
        if not stream:
            return model.invoke(messages)
        first, *rest = model.stream(messages)
        for chunk in rest:
            first += chunk
        assert isinstance(first, AIMessage)
        return first

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        self.invoke_with_cache_creation_input(stream=stream)
        again = self.invoke_with_cache_creation_input(stream=stream)
        details = again.usage_metadata["input_token_details"]  # type: ignore[index, typeddict-item]
        assert details["cache_read"] + again.response_metadata["blended_tokens"] > 0
        return again
