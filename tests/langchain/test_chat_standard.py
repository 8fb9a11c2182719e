"""LangChain's own conformance suites for chat models, over a tiny model that wears a chat template."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.langchain import ChatCacheBlend
from tests import tiny

TEMPLATE = (
    "{{ bos_token }}{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@cache
def chat_engine() -> BlendEngine:
    """One engine for all of the suites' tests."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    return BlendEngine(tiny.model(num_hidden_layers=2), tokenizer, config=BlendConfig(min_tokens=0, write_back="off"))


class _Suite:
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatCacheBlend

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": chat_engine(), "model_name": "tiny"}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"temperature": 0, "max_tokens": 8, "timeout": 60, "stop": [], "max_retries": 2}

    @property
    def has_tool_calling(self) -> bool:
        return False  # random weights do not call tools; the parsing of calls is tested apart

    @property
    def has_structured_output(self) -> bool:
        return False


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestChatUnit(_Suite, ChatModelUnitTests):
    """Unit suite."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestChatIntegration(_Suite, ChatModelIntegrationTests):
    """Integration suite."""
