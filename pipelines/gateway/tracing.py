"""Traces through OpenTelemetry: one span per request, as a child of the client's span.

Without OTEL_EXPORTER_OTLP_ENDPOINT the API's own no-op tracer is used.
"""

from __future__ import annotations

import os

from opentelemetry import propagate, trace
from starlette.requests import Request

from components.common.runtime.errors import ConfigurationError

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"


def configure_tracing() -> None:
    """Export spans as OpenTelemetry's environment variables configure it, if an endpoint is set.

    Raises:
        ConfigurationError: an endpoint is set, but the exporter is not installed.
    """
    if not os.environ.get(ENDPOINT_VARIABLE):
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigurationError(
            f"{ENDPOINT_VARIABLE} is set, but {error.name} is not installed",
            hint="Install opentelemetry-exporter-otlp-proto-http, or unset the variable.",
        ) from None
    name = os.environ.get("OTEL_SERVICE_NAME", "tuneline-gateway")
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def start_span(request: Request, operation: str) -> trace.Span:
    """Start the span of a request. The attribute names are those of the GenAI semantic conventions (1.4x, development).

    Args:
        request: its `traceparent` header names the parent span.
        operation: "chat" or "text_completion".
    """
    tracer = trace.get_tracer("tuneline.gateway")
    parent = propagate.extract(dict(request.headers))
    attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "tuneline"}
    return tracer.start_span(operation, context=parent, kind=trace.SpanKind.SERVER, attributes=attributes)
