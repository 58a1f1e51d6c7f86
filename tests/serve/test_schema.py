"""The OpenAPI schema against the running service: what it promises is what callers get (schemathesis).

A request may fit the schema and still be refused: that is what a content policy does. Everything else is checked.
"""

from __future__ import annotations

import pytest
import schemathesis
from helpers import serving
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance
from services import OPERATOR, bearer, make

from guardpaint.serve.app import create_app
from guardpaint.testing.doubles import FlagsBright

PATHS = (
    "/v1/images/generations", "/v1/models", "/v1/audits", "/v1/images/{name}.png", "/v1/reports/{name}",
    "/v1/reports/{name}/evidence", "/v1/me", "/v1/policy", "/v1/log/rotate", "/health", "/ready", "/metrics",
)  # fmt: skip


@pytest.fixture(scope="module")
def operations():
    """A running service that catches its self-test; every operation of its schema by path."""
    app = create_app(make(FlagsBright(gain=1.2), longest_prompt=400))
    found = {}
    with serving(app) as address:
        for result in schemathesis.openapi.from_url(f"{address}/openapi.json").get_all_operations():
            found.setdefault(result.ok().path, []).append(result.ok())
        yield found


def test_every_path_is_tried(operations):
    assert set(operations) == set(PATHS)


@pytest.mark.parametrize("path", PATHS)
def test_answers_are_as_promised(operations, path):
    for operation in operations[path]:

        @given(case=operation.as_strategy())
        @settings(
            max_examples=12, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck),
            derandomize=True, database=None,
        )  # fmt: skip
        def holds(case):
            case.call_and_validate(headers=bearer(OPERATOR), excluded_checks=[positive_data_acceptance])

        holds()
