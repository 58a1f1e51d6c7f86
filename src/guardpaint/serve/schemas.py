"""Request and response bodies: those of OpenAI's images API, plus the fields of a guarded model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class ImageRequest(BaseModel):
    """`POST /v1/images/generations`."""

    model_config = ConfigDict(extra="forbid")

    prompt: str = Field(min_length=1)
    model: str | None = None
    n: int = Field(1, ge=1)
    size: str | None = Field(None, pattern=r"^(auto|[1-9][0-9]{1,3}x[1-9][0-9]{1,3})$")
    response_format: Literal["b64_json", "url"] = "b64_json"
    seed: int | None = Field(None, ge=0, le=2**53)
    num_inference_steps: int | None = Field(None, ge=1)
    guidance_scale: float | None = Field(None, ge=0, le=50)
    stream: bool = False
    user: str | None = Field(None, max_length=200)
    quality: str | None = None
    style: str | None = None
    background: str | None = None
    output_format: Literal["png"] | None = None
    moderation: str | None = None
    partial_images: int | None = Field(None, ge=0, le=100)


class Safety(BaseModel):
    """What the guard did to one picture."""

    status: str
    triggered: bool
    category: str | None
    reason: str
    repaired_steps: int
    report: str
    """Id for `GET /v1/reports/{id}`."""


class ImageItem(BaseModel):
    b64_json: str | None = None
    url: str | None = None
    revised_prompt: str | None = None
    seed: int
    safety: Safety
    error: dict[str, Any] | None = None


class ImageResponse(BaseModel):
    created: int
    data: list[ImageItem]


class AuditResponse(BaseModel):
    """`POST /v1/audits`."""

    flagged: bool
    category: str | None
    reason: str
    probs: dict[str, float]
    scores: dict[str, float | None]
    boxes: list[list[int]]
    """x, y, width, height of every flagged region, in pixels of the upright picture as it was sent."""
    frames: int = 1
    """Every one was audited. The answer is about the worst."""
    frame: int = 1
    """The worst frame, counted from 1."""
    reading: str = ""
    """How the worst frame was shown to the auditor, such as `over black`; empty if there is only one way."""
    size: list[int] = []
    """Width and height of the upright frame as it was sent."""
    shrunk_to: list[int] | None = None
    """Width and height at which it was audited, if it was larger than is audited."""
    overlay: str | None = None
    """Heat map over the picture, base64 PNG; operators only."""


def problem(message: str, kind: str, code: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error body."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class ProblemDetail(BaseModel):
    model_config = ConfigDict(extra="allow")

    message: str
    type: str
    param: str | None
    code: str | None


class Problem(BaseModel):
    """The body of every error response."""

    error: ProblemDetail


MEANINGS = {
    400: "Malformed, or withheld by the content policy (error.code content_policy_violation)",
    401: "Missing or unknown API key",
    403: "For operators only",
    404: "Does not exist, or belongs to another caller",
    408: "The body did not arrive in time",
    413: "Too large",
    429: "Over the key's rate; see Retry-After",
    503: "Overloaded, closing, or the guard failed (error.code guard_failed); see Retry-After",
    504: "The request took too long; nothing was released",
}


def promised(*codes: int) -> dict[int | str, dict[str, Any]]:
    """The error responses of an endpoint, for its OpenAPI schema."""
    return {code: {"model": Problem, "description": MEANINGS[code]} for code in codes}
