"""Spans: the guard's stages inside a picture, when asked for."""

from __future__ import annotations

import pytest
import torch

from guardpaint.errors import BadConfig
from guardpaint.guard import GuardPaint
from guardpaint.serve import trace
from guardpaint.testing import small
from guardpaint.testing.doubles import FlagsBright, PaintsFlat


def test_no_environment_no_tracer():
    assert trace.tracer({}) is None


def test_missing_packages_are_named():
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
    except ImportError:
        with pytest.raises(BadConfig, match=r"guardpaint\[trace\]"):
            trace.tracer({"OTEL_SERVICE_NAME": "x"})


class Span:
    def __init__(self, name, start):
        self.name, self.start, self.end_time, self.attributes = name, start, None, {}

    def set_attribute(self, key, value):
        self.attributes[key] = value

    def end(self, end_time):
        self.end_time = end_time

    def get_span_context(self):
        return None


def test_stages_lie_inside_their_picture(monkeypatch):
    pytest.importorskip("opentelemetry")
    from opentelemetry import trace as api

    monkeypatch.setattr(api, "set_span_in_context", lambda span: span)
    made = []

    class Tracer:
        def start_span(self, name, context=None, start_time=None):
            made.append(Span(name, start_time))
            return made[-1]

    class Provider:
        def get_tracer(self, name):
            return Tracer()

    guard = GuardPaint(FlagsBright(gain=3.0), PaintsFlat())
    out = guard.attach(small.pipeline("sd"))(
        "a person", generator=torch.Generator().manual_seed(1), height=small.PIXELS, width=small.PIXELS,
        num_inference_steps=4,
    )  # fmt: skip
    trace.record(trace.tracer(provider=Provider()), out.safety, 100.0)
    names = [s.name for s in made]
    assert names[0] == "picture" and {"draft", "audit", "repair", "verify"} <= set(names)
    whole = made[0]
    assert whole.attributes["guardpaint.status"] == out.safety[0].status
    assert all(whole.start <= s.start <= s.end_time <= whole.end_time for s in made[1:])
