"""The HTTP application: routes only. Bodies are parsed by hand, so that every error names its field."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Request, Response

from conductor.gateway.http_completions import CompletionsApi
from conductor.gateway.http_errors import guarded, install_routing_errors, json_response
from conductor.gateway.http_service import DetokenizeRequest, ServiceApi, TokenizeRequest
from conductor.gateway.metrics import RequestMetrics
from conductor.gateway.openai_fields import ChatRequest, CompletionRequest
from conductor.gateway.openapi import openapi_document

REQUESTS: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
PROBES = ("/v1/models", "/v1/models/{name:path}", "/health", "/ready", "/version", "/metrics", "/openapi.json")


def build_http_app(completions: CompletionsApi, service: ServiceApi, metrics: RequestMetrics) -> FastAPI:
    app = FastAPI(title="Segue", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    install_routing_errors(app)
    document = openapi_document(service.version_name, REQUESTS, PROBES)

    async def openapi(http: Request) -> Response:
        return json_response(document)

    routes = (
        ("POST", "/v1/chat/completions", completions.chat),
        ("POST", "/v1/completions", completions.complete),
        ("GET", "/v1/models", service.models),
        ("GET", "/v1/models/{name:path}", service.model),
        ("GET", "/health", service.health),
        ("GET", "/ready", service.ready),
        ("GET", "/version", service.version),
        ("GET", "/metrics", service.metrics),
        ("POST", "/tokenize", service.tokenize),
        ("POST", "/detokenize", service.detokenize),
        ("GET", "/openapi.json", openapi),
    )
    assert {path for method, path, _ in routes if method == "POST"} == REQUESTS.keys()
    for method, path, endpoint in routes:
        app.router.add_route(path, guarded(endpoint, metrics), methods=[method])
    return app
