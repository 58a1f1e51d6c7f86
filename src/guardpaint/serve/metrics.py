"""Prometheus metrics of one service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from guardpaint.loop.report import GuardReport

SCORES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """Counts pictures by outcome, and keeps histograms of stage times, request times and auditor scores."""

    def __init__(self, depth: Callable[[], float]) -> None:
        self.registry, self.evidence = CollectorRegistry(), CollectorRegistry()
        make: Any = {"registry": self.registry}
        self.pictures = Counter("guardpaint_pictures", "Pictures by outcome", ["status"], **make)
        self.triggers = Counter("guardpaint_triggers", "Triggered pictures by category", ["category"], **make)
        self.repairs = Counter("guardpaint_repairs", "Repaired pictures by category", ["category"], **make)
        self.blocks = Counter("guardpaint_blocks", "Blocked pictures by category", ["category"], **make)
        self.failed_closed = Counter("guardpaint_failed_closed", "Pictures withheld because of an error", **make)
        self.stages = Histogram("guardpaint_stage_seconds", "Guard time per stage", ["stage"], buckets=SECONDS, **make)
        self.requests = Histogram(
            "guardpaint_request_seconds", "Time per request", ["path", "code"], buckets=SECONDS, **make
        )
        self.scores = Histogram(
            "guardpaint_audit_score", "adv_prob of first audits", buckets=SCORES, registry=self.evidence
        )
        self.queue = Gauge("guardpaint_queue_depth", "Pictures waiting or being drawn", **make)
        self.queue.set_function(depth)

    def count(self, reports: Sequence[GuardReport]) -> None:
        """Add the reports of a finished batch."""
        for report in reports:
            self.pictures.labels(report.status).inc()
            category = next((s.category for s in report.steps if s.triggered and s.category), "none")
            if report.triggered:
                self.triggers.labels(category).inc()
            if report.status == "repaired":
                self.repairs.labels(category).inc()
            if not report.released:
                self.blocks.labels(category).inc()
            if report.errors:
                self.failed_closed.inc()
            for step in report.steps:
                for stage, spent in step.timings.items():
                    self.stages.labels(stage).observe(spent)
                if step.audits and step.audits[0].scores["adv_prob"] is not None:
                    self.scores.observe(step.audits[0].scores["adv_prob"])

    def text(self, scores: bool = True) -> bytes:
        """All metrics in the Prometheus text format, with or without the auditor scores.

        Whoever reads the sum of a histogram before and after a picture knows the picture's exact score.
        """
        return generate_latest(self.registry) + (generate_latest(self.evidence) if scores else b"")
