"""The OpenAPI document, tried out by schemathesis: whatever a client sends, the server does not fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from cacheblend_rag.server.settings import Limits
from tests.server.common import Running, client_of, running, settings_for

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]


@pytest.fixture(scope="module")
def tried(model: Path, docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose answers are short."""
    limits = Limits(answer_tokens=3)
    with running(settings_for(model, docs, tmp_path_factory.mktemp("tried"), limits=limits)) as made:
        yield made


@pytest.fixture(scope="module")
def api(tried: Running) -> Any:
    """Its OpenAPI document."""
    return schemathesis.openapi.from_url(f"{tried.url}/openapi.json")


schema = schemathesis.pytest.from_fixture("api")


@schema.parametrize()
@hypothesis.settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
def test_no_request_makes_the_server_fail(case: schemathesis.Case, tried: Running) -> None:
    if "model" in (case.body if isinstance(case.body, dict) else {}) and isinstance(case.body["model"], str):
        embeds = case.path.endswith("embeddings")
        service = tried.service
        case.body["model"] = service.embedder_name if embeds else service.model_name
    if "id" in (case.path_parameters or {}) and case.method == "POST":
        case.path_parameters["id"] = "archive"
    case.call_and_validate(checks=CHECKS)


def test_the_document_names_every_endpoint(tried: Running) -> None:
    with client_of(tried) as client:
        paths = client.get("/openapi.json").json()["paths"]
        page = client.get("/docs").text
    assert {"/v1/chat/completions", "/v1/embeddings", "/api/state", "/api/collections/{id}/ask"} <= set(paths)
    assert all(path in page for path in paths)
    assert "http://" not in page.replace(tried.url, "")
    assert "https://" not in page
