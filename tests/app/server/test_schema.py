"""The OpenAPI document, tried out by schemathesis: whatever a client sends, the server does not fail."""

from __future__ import annotations

import contextlib
import re
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from cacheblend_rag.app.server.settings import Limits
from tests.app.server.common import Running, client_of, running, settings_for

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
# Random requests need not hold one that makes sense, so each of these is sent besides.
SENSIBLE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "", "prompt": "Once"},
    "/v1/chat/completions": {"model": "", "messages": [{"role": "user", "content": "Who?"}]},
    "/v1/responses": {"model": "", "input": "Who?"},
    "/v1/embeddings": {"model": "", "input": ["one", "two"]},
    "/api/ask": {"question": "Who?"},
}


@pytest.fixture(scope="module")
def tried(model: Path, docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose answers are short."""
    limits = Limits(answer_tokens=3)
    with running(settings_for(model, docs, tmp_path_factory.mktemp("tried"), limits=limits)) as made:
        yield made


@pytest.mark.parametrize("tries", [1, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_makes_the_server_fail(mode: GenerationMode, tries: int, tried: Running) -> None:
    api = schemathesis.openapi.from_url(f"{tried.url}/openapi.json")
    operations = [found.ok() for found in api.get_all_operations()]
    assert len(operations) >= 15
    before = requests_counted(tried)
    for operation in operations:
        with contextlib.suppress(unittest.SkipTest, hypothesis.errors.Unsatisfiable):  # nothing to get wrong
            try_out(operation, mode, tries, tried.service)
        if mode is GenerationMode.POSITIVE and operation.path in SENSIBLE:
            body = dict(SENSIBLE[operation.path])
            send(operation.Case(body=body, media_type="application/json", path_parameters={"id": ""}), tried.service)
    counts = requests_counted(tried)
    assert sum(counts.values()) - sum(before.values()) > 5 * tries, "some endpoints have nothing to get wrong"
    if mode is GenerationMode.POSITIVE:
        fine = {path for path, status in counts if status in ("200", "201", "202")}
        assert set(SENSIBLE) <= fine


def requests_counted(tried: Running) -> dict[tuple[str, str], float]:
    """By path and status, how many requests the server has answered."""
    with client_of(tried) as client:
        found = re.findall(r'requests_total\{path="([^"]+)",status="(\d+)"\} (\S+)', client.get("/metrics").text)
    return {(path, status): float(count) for path, status, count in found}


def try_out(operation: Any, mode: GenerationMode, tries: int, service: Any) -> None:
    """Send some requests of one kind."""

    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    @hypothesis.settings(
        max_examples=tries,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    def attempt(case: Any) -> None:
        send(case, service)

    attempt()


def send(case: Any, service: Any) -> None:
    """Send a request with names that exist, so that most reach the model and not only the checks before it."""
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        embeds = case.path.endswith("embeddings")
        case.body["model"] = service.embedder_name if embeds else service.model_name
    if "id" in (case.path_parameters or {}) and case.method.upper() != "DELETE":
        case.path_parameters["id"] = next(iter(service.base.documents())).id
    case.call_and_validate(checks=CHECKS)
