"""Requests made from the server's own OpenAPI description: whatever is sent, nothing answers 5xx, and nothing hangs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode

from tests.serving import Running, serving
from vlm_batch import VLMBatcher
from vlm_batch.assets import default_checkpoint

#: Requests for each endpoint that takes a body, well-formed and otherwise.
EXAMPLES = 60
SECONDS = 20.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Short answers, so that what is well-formed ends soon."""
    with serving(
        lambda: VLMBatcher(default_checkpoint(), max_rows=8),
        default_max_tokens=4,
        max_choices=2,
        max_prompts=2,
        request_seconds=10.0,
        files=tmp_path_factory.mktemp("schema"),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def operations(server: Running) -> dict[str, Any]:
    """Every endpoint of the description."""
    found = schemathesis.openapi.from_url(
        f"{server.url}/openapi.json"
    ).get_all_operations()
    return {operation.label: operation for operation in map(_known, found)}


def _known(found: Any) -> Any:
    return found.ok()


ENDPOINTS = (
    "POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models", "GET /v1/models/{name}", "GET /version",
    "GET /health", "GET /ready", "GET /metrics", "GET /stats", "POST /v1/messages", "POST /v1/messages/count_tokens",
    "POST /v1/responses", "POST /v1/responses/input_tokens", "GET /v1/responses/{response_id}",
    "DELETE /v1/responses/{response_id}", "POST /v1/responses/{response_id}/cancel",
    "GET /v1/responses/{response_id}/input_items", "POST /v1/files", "GET /v1/files", "GET /v1/files/{file_id}",
    "GET /v1/files/{file_id}/content", "DELETE /v1/files/{file_id}", "POST /v1/batches", "GET /v1/batches",
    "GET /v1/batches/{batch_id}", "POST /v1/batches/{batch_id}/cancel",
)  # fmt: skip


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_no_request_is_a_fault(
    server: Running, operations: dict[str, Any], endpoint: str, mode: GenerationMode
) -> None:
    """Well-formed ones and others."""
    statuses: set[int] = set()

    @hypothesis.given(case=operations[endpoint].as_strategy(generation_mode=mode))
    @hypothesis.settings(
        max_examples=EXAMPLES if endpoint.startswith("POST") else 5,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    def ask(case: Any) -> None:
        _shorten(case.body)
        response = case.call(base_url=server.url, timeout=SECONDS)
        statuses.add(response.status_code)
        assert response.status_code < 500, response.text
        if response.status_code >= 400 and response.content:
            said = response.json()
            if "/v1/messages" in endpoint:
                assert set(said) == {"type", "error", "request_id"}
                assert set(said["error"]) == {"type", "message"}
            else:
                assert set(said["error"]) == {"message", "type", "param", "code"}

    try:
        ask()
    except hypothesis.errors.Unsatisfiable:
        # there is nothing to get wrong about this endpoint
        assert mode is GenerationMode.NEGATIVE
        assert "{" in endpoint or endpoint.startswith("GET")
    if endpoint.startswith("POST") and "{" not in endpoint:
        # there is no file of the name that a well-formed batch has
        wanted = 404 if endpoint == "POST /v1/batches" else 200
        assert statuses & ({wanted} if mode is GenerationMode.POSITIVE else {400})


def _shorten(body: Any) -> None:
    """A long answer is no fault; nobody wants to wait for it. Any object is hardly ever a schema."""
    if isinstance(body, dict):
        body.pop("json_schema", None)
        body.pop("guided_json", None)
        if "prompt" in body:
            body["prompt"] = _with_tokens(body["prompt"])
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        value = body.get(name) if isinstance(body, dict) else None
        # the description calls 7.0 an integer
        if isinstance(value, (int, float)) and value > 4:
            body[name] = 4


def _with_tokens(prompt: Any) -> Any:
    """A prompt that has tokens: the description cannot say that one must not be empty, nor which ids a model has."""
    if isinstance(prompt, bool):
        return prompt
    if isinstance(prompt, int):
        return abs(prompt) % 50
    if isinstance(prompt, list):
        # two prompts are the server's limit
        return [_with_tokens(part) for part in prompt[:2]] or "count to 3"
    return prompt or "count to 3"


def test_the_endpoints_are_those_of_the_description(operations: dict[str, Any]) -> None:
    assert set(operations) == set(ENDPOINTS)


def test_the_description_allows_no_other_fields(server: Running) -> None:
    found = server.ask("GET", "/openapi.json").json
    assert (
        found["components"]["schemas"]["ChatRequest"]["additionalProperties"] is False
    )


def test_after_all_of_it_the_server_answers(server: Running) -> None:
    reply = server.chat("count to 3", max_tokens=10)
    assert reply.json["choices"][0]["message"]["content"] == "1 2 3"
    stats = server.ask("GET", "/stats").json["batch"]
    assert (
        stats["decoding"] + stats["prefilling"] + stats["waiting"] + stats["queued"]
        == 0
    ), json.dumps(stats)
