"""HTML pages from the templates in guardpaint/templates. Every value is escaped."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from guardpaint.store.images import data_url


@cache
def environment() -> Environment:
    """The template loader; a value that a template names and nobody passed is an error."""
    env = Environment(
        loader=PackageLoader("guardpaint"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    env.filters["data_url"] = data_url
    return env


def render(template: str, **values: Any) -> str:
    """Return the page that a template such as "report.html.j2" makes of these values."""
    return environment().get_template(template).render(**values)
