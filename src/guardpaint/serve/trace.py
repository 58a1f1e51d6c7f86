"""OpenTelemetry spans of guarded pictures and their stages. Tracing is on when an OTEL_* variable is set."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from guardpaint.errors import BadConfig
from guardpaint.loop.report import GuardReport

STAGES = ("draft", "view", "audit", "preview", "repair", "verify", "reinsert")


def tracer(environment: Mapping[str, str] | None = None, provider: Any = None) -> Any | None:
    """A tracer if the environment has OTEL_* variables or a provider is given, else None.

    The SDK reads the exporter's configuration from the same variables.
    """
    if provider is None:
        if not any(k.startswith("OTEL_") for k in (os.environ if environment is None else environment)):
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise BadConfig("OTEL_* is set; tracing needs: pip install 'guardpaint[trace]'") from error
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer("guardpaint")


def record(tracer: Any, reports: Sequence[GuardReport], seconds: float) -> None:
    """Write one span per picture with one child span per stage; time that the guard did not spend is the draft's."""
    end = time.time_ns()
    for report in reports:
        from opentelemetry import trace

        start = end - round(seconds * 1e9)
        whole = tracer.start_span("picture", start_time=start)
        whole.set_attribute("guardpaint.request", report.request_id)
        whole.set_attribute("guardpaint.status", report.status)
        whole.set_attribute("guardpaint.triggered", report.triggered)
        inside = trace.set_span_in_context(whole)
        spent: dict[str, float] = {}
        for step in report.steps:
            for stage, value in step.timings.items():
                spent[stage] = spent.get(stage, 0.0) + value
        spent["draft"] = max(0.0, seconds - sum(spent.values()))
        at = start
        for stage in [*STAGES, *(s for s in spent if s not in STAGES)]:
            if stage in spent:
                span = tracer.start_span(stage, context=inside, start_time=at)
                at += round(spent[stage] * 1e9)
                span.end(end_time=at)
        whole.end(end_time=end)
