"""Bodies and heads of requests that are out of all proportion, or no text."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cacheblend_rag.app.server.api.bodies import MOST_VALUES
from tests.app.server.common import Running, client_of, running, settings_for

KEY = "ada-0123456789abcdef"
CHAT = {"messages": [{"role": "user", "content": "red"}], "max_tokens": 2}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "red", "max_tokens": 2},
    "/v1/responses": {"input": "red", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "red"},
    "/api/search": {"question": "red"},
    "/api/ask": {"question": "red", "max_tokens": 2},
    "/api/compare": {"question": "red", "max_tokens": 2},
}
# Seconds of this process that any body takes; it was half a minute before there was a limit.
SOON = 2.5


@pytest.fixture(scope="module")
def asked(chat_model: Path, docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(settings_for(chat_model, docs, tmp_path_factory.mktemp("data"), keys={"ada": KEY})) as made:
        yield made


@pytest.fixture
def client(asked: Running) -> Iterator[httpx.Client]:
    """What the tests before left is not looked at by the collector, as in a server that has just started."""
    gc.freeze()
    with client_of(asked, KEY) as made:
        yield made
    gc.unfreeze()


def whole(server: Running, path: str, **more: Any) -> dict[str, Any]:
    """A body that fits, with something added."""
    service = server.service
    name = service.embedder_name if path.endswith("embeddings") else service.model_name
    return {**({"model": name} if path.startswith("/v1/") else {}), **BODIES[path], **more}


def post(client: httpx.Client, path: str, body: Any) -> httpx.Response:
    """Send a body, which httpx would not write where it is no text; it must cost little."""
    began = time.process_time()
    answer = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert time.process_time() - began < SOON
    return answer


def fields_of(client: httpx.Client, path: str) -> list[str]:
    """All fields of the bodies of a path, by the OpenAPI document."""
    document = client.get("/openapi.json").json()
    (found,) = [
        methods["post"] for template, methods in document["paths"].items() if template == path and "post" in methods
    ]
    schema = found["requestBody"]["content"]["application/json"]["schema"]
    return list(document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[-1]]["properties"])


def test_body_full_of_wrong_values_is_refused_soon_in_every_field(asked: Running, client: httpx.Client) -> None:
    """As many as are looked at; more are refused whatever they are."""
    full = [1] * (MOST_VALUES - 200)
    for path, field in ((one, field) for one in (_TALK, _ITEMS, _ASK) for field in fields_of(client, one)):
        answer = post(client, path, whole(asked, path, **{field: full}))
        assert answer.status_code in (200, 201, 400, 413, 422), (path, field)


_TALK, _, _ITEMS, *_ = BODIES
_ASK = "/api/ask"
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (_ASK, {"verify": 1}, "verify: use 'off', 'idle', 'always' or 'held', not 1"),
    (_ASK, {"reasoning": 1}, "reasoning: use true, false, 'low', 'medium' or 'high', not 1"),
    (_ASK, {"reasoning": "loud"}, "reasoning: use true, false, 'low', 'medium' or 'high', not \"loud\""),
    (_ASK, {"stream": 0}, "stream: use true or false, not 0"),
    (_ASK, {"show_prompt": "yes"}, 'show_prompt: use true or false, not "yes"'),
    (_ASK, {"max_tokens": True}, "max_tokens: use a number, not true"),
    (_ASK, {"recompute_ratio": 2}, "recompute_ratio: use less than or equal to 1, not 2"),
    (_TALK, {"verify": "sometimes"}, "verify: use 'off', 'idle', 'always' or 'held', not \"sometimes\""),
    (_TALK, {"temperature": True}, "temperature: use a number, not true"),
    (_TALK, {"reasoning": {"enabled": 1}}, "reasoning.enabled: use true or false, not 1"),
    (_ITEMS, {"parallel_tool_calls": 0}, "parallel_tool_calls: use true or false, not 0"),
]


def test_value_of_another_kind_is_named_with_what_to_use(asked: Running, client: httpx.Client) -> None:
    """In either API; the status is that which each documents."""
    for path, more, message in WRONG:
        answer = post(client, path, whole(asked, path, **more))
        assert answer.json()["error"]["message"] == message
        assert answer.json()["error"]["field"] == message.partition(":")[0]
        assert answer.status_code == (400 if path.startswith("/v1") else 422), message


def test_words_for_thinking_are_those_of_commands(asked: Running, client: httpx.Client) -> None:
    for word in (False, "none", "off", None):
        assert post(client, _ASK, whole(asked, _ASK, reasoning=word, stream=False)).status_code == 200
    refused = post(client, _ASK, whole(asked, _ASK, reasoning="on"))
    assert refused.status_code == 400, "this model marks no thoughts"


def test_body_of_more_values_than_may_be_is_refused_whatever_they_are(asked: Running, client: httpx.Client) -> None:
    many = [1] * (MOST_VALUES + 1)
    for path in BODIES:
        for body in (
            many,
            whole(asked, path, unknown=[many[:100]] * 1_000),
            whole(asked, path, **{f"unknown {number}": 1 for number, _ in enumerate(many)}),
            whole(asked, path, **{next(iter(BODIES[path])): many}),
        ):
            answer = post(client, path, body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_many_values"), path


def test_every_list_and_mapping_of_a_body_has_a_limit(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    seen, unlimited = set[str](), set[str]()

    def look(schema: Any, place: str) -> None:
        if isinstance(schema, list):
            for one in schema:
                look(one, place)
        if not isinstance(schema, dict):
            return
        if (named := schema.get("$ref", "").rsplit("/", 1)[-1]) and named not in seen:
            seen.add(named)
            look(document["components"]["schemas"][named], named)
        if schema.get("type") == "array" and "maxItems" not in schema:
            unlimited.add(place)
        if isinstance(schema.get("additionalProperties"), dict) and "maxProperties" not in schema:
            unlimited.add(place)
        for name, inner in schema.items():
            look(inner, f"{place}.{name}" if schema.get("type") != "object" else name)

    for template, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        look(content.get("application/json", {}).get("schema"), template)
    assert {"ChatBody", "ResponsesBody", "AskBody", "EmbeddingBody"} <= seen
    assert unlimited == set()


def test_half_of_a_surrogate_pair_is_refused_wherever_it_stands(asked: Running, client: httpx.Client) -> None:
    """In labels that are only sent back, too."""
    half = "\ud800"
    for path in BODIES:
        for more in ({"metadata": {half: "label"}}, {"unknown": [[half]]}, {half: 1}, {next(iter(BODIES[path])): half}):
            answer = post(client, path, whole(asked, path, **more, stream=True))
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_unicode"), (path, more)


@pytest.mark.parametrize("path", ["/v1/responses", "/api/ask"])
def test_body_is_utf_8_and_nothing_else(path: str, asked: Running, client: httpx.Client) -> None:
    """Halves of pairs hide in other encodings, and as bytes."""
    for half in ("\ud800", "\\ud800"):
        text = json.dumps(whole(asked, path, metadata={"label": "LABEL"}, user="LABEL")).replace("LABEL", half)
        for encoding in ("utf-8", "utf-16", "utf-16-le", "utf-32"):
            content = text.encode(encoding, "surrogatepass")
            answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
            assert (answer.status_code, answer.json()["error"]["code"]) in [
                (400, "not_unicode"),
                (400 if path.startswith("/v1/") else 422, "invalid"),
            ]
    marked = b"\xef\xbb\xbf" + json.dumps(whole(asked, path)).encode()  # as some programs of Windows write it
    answer = client.post(path, content=marked, headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 201)


def test_addresses_that_are_none_are_refused(client: httpx.Client) -> None:
    for host, status in {"[": 421, "[::1": 421, "[zz]:80": 421, "localhost:port": 200}.items():
        assert client.get("/healthz", headers={"Host": host}).status_code == status, host
    for origin in (b"http://[", b"http://[zz]", b"null", "http://\u2100".encode()):
        assert client.post("/healthz", headers={b"Origin": origin}).status_code == 403, origin
