"""Chat templates that requests would run, and those that refuse a conversation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.app.server.common import Running, client_of, running, settings_for

# Reads two arguments.
TEMPLATE = (
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('The user speaks first') }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{{ mood }}"
    "{% if rounds %}{{ rounds }}{% endif %}"
    "{% if add_generation_prompt %}{% generation %}[assistant] {% endgeneration %}{% endif %}"
)
BOMB = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
SAID = [{"role": "user", "content": "Which leaf fell?"}]


@pytest.fixture(scope="module")
def templated(docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("templated")
    tiny.model(num_hidden_layers=2, max_position_embeddings=2048).save_pretrained(folder)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    with running(settings_for(folder, docs, tmp_path_factory.mktemp("data"))) as made:
        yield made


def chat(client: Any, **arguments: Any) -> Any:
    model = client.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "messages": SAID, "max_tokens": 2, "chat_template_kwargs": arguments}
    return client.post("/v1/chat/completions", json=body)


def test_request_cannot_bring_its_own_template(templated: Running) -> None:
    with client_of(templated) as client:
        for name in ("chat_template", "chat_template ", "Chat_Template"):
            answer = chat(client, **{name: BOMB})
            assert answer.status_code in (400, 422)
            assert answer.json()["error"]["field"].startswith("chat_template_kwargs")
        for name in ("tokenize", "tools", "messages", "range", "bos_token", "nothing"):
            answer = chat(client, **{name: True})
            assert answer.status_code == 400
            assert name in answer.json()["error"]["message"]
            assert "use mood, rounds" in answer.json()["error"]["message"]


def test_template_gets_the_arguments_that_it_reads(templated: Running) -> None:
    with client_of(templated) as client:
        plain, moody = chat(client), chat(client, mood="a mood of several words")
        assert plain.status_code == moody.status_code == 200
        assert moody.json()["usage"]["prompt_tokens"] > plain.json()["usage"]["prompt_tokens"]
        assert chat(client, mood="x" * 201).status_code == 400
        assert chat(client, **{f"a{n}": 1 for n in range(17)}).status_code == 400


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_order_of_messages_that_the_template_refuses_is_named(templated: Running, path: str) -> None:
    said = [{"role": "assistant", "content": "A leaf fell."}, *SAID]
    with client_of(templated) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        given: dict[str, Any] = {"input": said} if path == "responses" else {"messages": said}
        answer = client.post(f"/v1/{path}", json={"model": model, "stream": True, **given})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "bad_prompt"
    message = answer.json()["error"]["message"]
    assert message.startswith("messages with the roles assistant, user")
    assert "The user speaks first" in message
