"""LangChain's integration suite for chat models, run with ChatOpenAI against the server, over both of its APIs.

Skipped by the suite: images, audio and PDF (the models read text), another model by call (a server has one), recorded
HTTP traffic (there is none).
"""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from tests.app.server.common import Running, process_logits
from tests.integrations.langchain.models import Script, standard_call

# Of the suite and the clients, about themselves.
pytestmark = [
    pytest.mark.slow,  # the suite runs on the adapter each time, and OpenAI's clients on the server
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning",
        "ignore:Received a Pydantic BaseModel V1:UserWarning",
        "ignore:Pydantic serializer warnings:UserWarning",
    ),
]


class _Suite(ChatModelIntegrationTests):
    responses = False

    @pytest.fixture(autouse=True)
    def _served(self, chatty: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = chatty
        process_logits(monkeypatch, Script(chatty.service.engine.tokenizer, standard_call, free=8))

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "base_url": self.server.url + "/v1",
            "api_key": "sk-none-needed-here",
            "model": self.server.service.model_name,
            "use_responses_api": self.responses,
            "max_tokens": 200,
            "stream_usage": True,
            # LangChain keeps connections for all models of a process, and each async test has a loop of its own.
            "default_headers": {"Connection": "close"},
        }

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return False


class TestChatCompletions(_Suite):
    """Over chat completions."""


class TestResponses(_Suite):
    """Over responses."""

    responses = True
