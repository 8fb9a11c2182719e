"""Requests say whether an answer that only repeats itself is ended."""

from __future__ import annotations

from typing import Any

import pytest

from tests.app.server.common import Running, client_of, process_logits
from tests.engine.test_repetition import ROUND, SAID, Writer

PROMPT = "Which leaf?"
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 300},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 300},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 300},
    "/api/ask": {"question": PROMPT, "max_tokens": 300, "stream": False},
}


@pytest.mark.parametrize("path", ["/v1/responses", "/api/ask"])
def test_requests_let_an_answer_go_on_that_only_repeats_itself(
    chatty: Running, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    process_logits(monkeypatch, Writer(chatty.service.engine.tokenizer, SAID + ROUND * 60))
    with client_of(chatty) as client:
        stopped = []
        for asked in ({}, {"stop_repetition": True}, {"stop_repetition": False}):
            body = {"model": chatty.service.model_name, **REQUESTS[path], **asked}
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            found = answer.json()
            report = found.get("report") or found["cacheblend"]
            stopped.append((report[0] if isinstance(report, list) else report)["stopped_by"])
        assert stopped == ["repetition", "repetition", ""]
