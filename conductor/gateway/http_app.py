"""The HTTP application: routes only. Bodies are parsed by hand, so that every error names its field."""

from __future__ import annotations

from fastapi import FastAPI

from conductor.gateway.http_completions import CompletionsApi
from conductor.gateway.http_errors import guarded, install_routing_errors
from conductor.gateway.http_service import ServiceApi
from conductor.gateway.metrics import RequestMetrics


def build_http_app(completions: CompletionsApi, service: ServiceApi, metrics: RequestMetrics) -> FastAPI:
    app = FastAPI(title="Segue", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    install_routing_errors(app)
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
    )
    for method, path, endpoint in routes:
        app.router.add_route(path, guarded(endpoint, metrics), methods=[method])
    return app
