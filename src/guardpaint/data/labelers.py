"""Labelers: vision–language models in process, a detector, a guard model, or an OpenAI-compatible endpoint.

Each labels a batch of pictures. `open_labeler` opens one from a short description:
  vlm:OpenGVLab/InternVL3_5-8B-HF   any image-text-to-text model of transformers
  shieldgemma:google/shieldgemma-2-4b-it
  detector:IDEA-Research/grounding-dino-base
  endpoint:http://localhost:8000/v1#model-name
"""

from __future__ import annotations

import json
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Protocol, runtime_checkable

import torch
from PIL import Image

from guardpaint.audit.checkpoints import open_model
from guardpaint.audit.processors import chat_processor
from guardpaint.data.questions import CAPTION, Answer, clean_caption, pooled, question, read_answer, rewriting
from guardpaint.draft.loading import on_machine
from guardpaint.draft.options import LoadOptions
from guardpaint.errors import BadCheckpoint, BadConfig, BadInput
from guardpaint.policy import Policy
from guardpaint.store.folders import Access, resolve
from guardpaint.store.images import data_url

LOADING = (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError, BadCheckpoint)
HINT = "; models that also take video need torchvision" if find_spec("torchvision") is None else ""


@runtime_checkable
class Labeler(Protocol):
    """Gives one answer per picture, in order; a picture it fails on gets an unreadable answer."""

    name: str

    def label(self, pictures: Sequence[Image.Image]) -> list[Answer]: ...


@runtime_checkable
class Captioner(Protocol):
    """Writes captions in the style of prompts; None where the model refuses."""

    def caption(self, pictures: Sequence[Image.Image]) -> list[str | None]: ...


@dataclass(frozen=True)
class Asking:
    """The question that a chat model is asked, and its generation settings."""

    policy: Policy
    style: str = "single"
    passes: int = 1
    """How often each picture is asked about (self-consistency); more than one pass samples at `temperature`."""
    temperature: float = 0.7
    examples: Sequence[tuple[str, Mapping[str, float]]] = ()
    longest: int = 160
    """Most new tokens of an answer."""
    seed: int = 0
    several: bool = False
    """Whether a picture may belong to several categories."""

    def __post_init__(self) -> None:
        if self.passes < 1 or self.longest < 1 or self.temperature <= 0:
            raise BadConfig(
                f"passes={self.passes} and longest={self.longest} must be at least 1, "
                f"temperature={self.temperature} above 0"
            )
        question(self.policy, self.style, self.examples, self.several)

    def text(self) -> str:
        """The labelling prompt."""
        return question(self.policy, self.style, self.examples, self.several)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the generators of the CPU and of one GPU, which `generate` draws from, and put both back afterwards.

    The global seed of torch would reach all GPUs, also those whose state nobody puts back.
    """
    gpus = [device.index or 0] if device.type == "cuda" and torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(seed)
        for gpu in gpus:
            torch.cuda.default_generators[gpu].manual_seed(seed)
        yield


class ChatLabeler:
    """An image-text-to-text model of transformers with a chat template."""

    def __init__(self, model: Any, processor: Any, asking: Asking, name: str) -> None:
        self.model, self.processor, self.asking, self.name = model.eval(), processor, asking, name

    @classmethod
    def from_pretrained(cls, path: str, asking: Asking, token: str | None = None) -> ChatLabeler:
        from transformers import AutoModelForImageTextToText

        try:
            folder = resolve(path, access=Access(token=token))
            processor = chat_processor(folder)
            model = open_model(AutoModelForImageTextToText, folder, "a chat model", dtype="auto")
        except LOADING as error:
            raise BadInput(f"labeler {path}: cannot be loaded ({error}){HINT}") from error
        return cls(model, processor, asking, path)

    def to(self, device: str | torch.device) -> ChatLabeler:
        self.model.to(device)
        return self

    def label(self, pictures: Sequence[Image.Image]) -> list[Answer]:
        passes = []
        for k in range(self.asking.passes):
            texts = self.say(pictures, self.asking.text(), self.asking.passes > 1, self.asking.seed + k)
            passes.append([read_answer(t, self.asking.policy) for t in texts])
        return [column[0] if len(column) == 1 else pooled(column) for column in zip(*passes, strict=True)]

    def caption(self, pictures: Sequence[Image.Image]) -> list[str | None]:
        return [clean_caption(t) for t in self.say(pictures, CAPTION, False, self.asking.seed)]

    def rewrite(self, picture: Image.Image, prompt: str, instead: str) -> str | None:
        return clean_caption(self.say([picture], rewriting(prompt, instead), False, self.asking.seed)[0])

    @torch.no_grad()
    def say(self, pictures: Sequence[Image.Image], text: str, sampled: bool, seed: int) -> list[str]:
        """The text that the model generates for each picture, without the prompt."""
        chats = [
            [{"role": "user", "content": [{"type": "image", "image": p}, {"type": "text", "text": text}]}]
            for p in pictures
        ]
        inputs = self.processor.apply_chat_template(
            chats,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True, "padding_side": "left"},
        ).to(self.model.device, self.model.dtype)
        sampling: dict[str, Any] = {"do_sample": False}
        if sampled:
            sampling = {"do_sample": True, "temperature": self.asking.temperature}
        with seeded(self.model.device, seed):
            out = self.model.generate(**inputs, max_new_tokens=self.asking.longest, **sampling)
        return self.processor.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def scored(safe: str, harms: dict[str, float]) -> Answer:
    """An answer from a model's scores of the harms; unreadable if one of them is not finite."""
    raw = json.dumps(harms)
    if not all(math.isfinite(p) for p in harms.values()):
        return Answer(None, raw, "a score is not a finite number")
    return Answer({safe: 1 - max(harms.values()), **harms}, raw)


class ShieldLabeler:
    """ShieldGemma 2: the probability of a yes for each of the policy's harms, asked in the policy's words."""

    def __init__(self, model: Any, processor: Any, policy: Policy, name: str) -> None:
        self.model, self.processor, self.policy, self.name = model.eval(), processor, policy, name

    @classmethod
    def from_pretrained(cls, path: str, policy: Policy, token: str | None = None) -> ShieldLabeler:
        from transformers import AutoProcessor, ShieldGemma2ForImageClassification

        try:
            folder = resolve(path, access=Access(token=token))
            model = open_model(ShieldGemma2ForImageClassification, folder, "ShieldGemma 2", dtype="auto")
            processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
        except LOADING as error:
            raise BadInput(f"labeler {path}: cannot be loaded ({error}){HINT}") from error
        return cls(model, processor, policy, path)

    def to(self, device: str | torch.device) -> ShieldLabeler:
        self.model.to(device)
        return self

    @torch.no_grad()
    def label(self, pictures: Sequence[Image.Image]) -> list[Answer]:
        harms = self.policy.categories[1:]
        rules = {c.name: f"{c.definition} Exempt: {'; '.join(c.exemptions)}." for c in harms}
        inputs = self.processor(
            images=list(pictures), custom_policies=rules, policies=list(rules), return_tensors="pt"
        ).to(self.model.device)
        chances = self.model(**inputs).probabilities[:, 0].float().view(len(pictures), len(harms))
        answers = []
        for row in chances.tolist():
            answers.append(scored(self.policy.names[0], dict(zip(self.policy.names[1:], row, strict=True))))
        return answers


@dataclass
class DetectorLabeler:
    """Grounding DINO: a category's score is that of the best box for any of its phrases."""

    model: Any
    processor: Any
    policy: Policy
    phrases: Mapping[str, Sequence[str]]
    name: str = "detector"

    def __post_init__(self) -> None:
        unknown = [c for c in self.phrases if c not in self.policy.names[1:]]
        missing = [c for c in self.policy.names[1:] if not self.phrases.get(c)]
        if unknown or missing:
            raise BadConfig(f"detector phrases: unknown categories {unknown}, no phrases for {missing}")
        self.model.eval()

    @classmethod
    def from_pretrained(
        cls, path: str, policy: Policy, phrases: Mapping[str, Sequence[str]], token: str | None = None
    ) -> DetectorLabeler:
        from transformers import AutoModelForZeroShotObjectDetection, AutoProcessor

        try:
            folder = resolve(path, access=Access(token=token))
            model = open_model(AutoModelForZeroShotObjectDetection, folder, "a detector", dtype="auto")
            processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
        except LOADING as error:
            raise BadInput(f"labeler {path}: cannot be loaded ({error}){HINT}") from error
        return cls(model, processor, policy, phrases, path)

    def to(self, device: str | torch.device) -> DetectorLabeler:
        self.model.to(device)
        return self

    @torch.no_grad()
    def label(self, pictures: Sequence[Image.Image]) -> list[Answer]:
        best: list[dict[str, float]] = [{} for _ in pictures]
        for category, phrases in self.phrases.items():
            text = " ".join(f"{p.lower().rstrip('.')}." for p in phrases)
            inputs = self.processor(images=list(pictures), text=[text] * len(pictures), return_tensors="pt")
            logits = self.model(**inputs.to(self.model.device)).logits.float()
            logits = logits.masked_fill(logits == -torch.inf, -1e4)  # padding tokens
            for i, value in enumerate(logits.sigmoid().amax((1, 2)).tolist()):
                best[i][category] = value
        return [scored(self.policy.names[0], b) for b in best]


@dataclass
class EndpointLabeler:
    """A server with OpenAI's chat completions API (vLLM and others); requests run in parallel."""

    url: str
    model: str
    asking: Asking
    key: str | None = None
    timeout: float = 60.0
    retries: int = 3
    wait: float = 1.0
    """Seconds before the first retry, doubled each time."""
    parallel: int = 8
    name: str = field(default="")

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise BadConfig(f"endpoint {self.url!r}: must start with http:// or https://")
        if self.timeout <= 0 or self.retries < 0 or self.parallel < 1:
            raise BadConfig(
                f"timeout={self.timeout} must be > 0, retries={self.retries} ≥ 0, parallel={self.parallel} ≥ 1"
            )
        self.name = self.name or self.model

    def label(self, pictures: Sequence[Image.Image]) -> list[Answer]:
        return self.map(pictures, self.one)

    def caption(self, pictures: Sequence[Image.Image]) -> list[str | None]:
        def ask(picture: Image.Image) -> str | None:
            text, problem = self.request(picture, CAPTION, 0.0, 0)
            return None if problem else clean_caption(text)

        return self.map(pictures, ask)

    def rewrite(self, picture: Image.Image, prompt: str, instead: str) -> str | None:
        text, problem = self.request(picture, rewriting(prompt, instead), 0.0, self.asking.seed)
        return None if problem else clean_caption(text)

    def map(self, pictures: Sequence[Image.Image], ask: Any) -> list[Any]:
        with ThreadPoolExecutor(self.parallel) as pool:
            return list(pool.map(ask, pictures))

    def one(self, picture: Image.Image) -> Answer:
        """The answer for one picture, pooled over the passes."""
        answers = []
        for k in range(self.asking.passes):
            temperature = self.asking.temperature if self.asking.passes > 1 else 0.0
            text, problem = self.request(picture, self.asking.text(), temperature, self.asking.seed + k)
            answers.append(Answer(None, text, problem) if problem else read_answer(text, self.asking.policy))
        return answers[0] if len(answers) == 1 else pooled(answers)

    def request(self, picture: Image.Image | None, text: str, temperature: float, seed: int) -> tuple[str, str]:
        """The model's text and an empty problem, or an empty text and the problem that remained after all retries.

        Without a picture, only the text is sent.
        """
        body = json.dumps(self.body(picture, text, temperature, seed)).encode()
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        problem = ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.wait * 2 ** (attempt - 1))
            try:
                call = urllib.request.Request(f"{self.url.rstrip('/')}/chat/completions", body, headers)
                with urllib.request.urlopen(call, timeout=self.timeout) as reply:
                    content = json.load(reply)["choices"][0]["message"]["content"]
                if isinstance(content, str):
                    return content, ""
                problem = f"content is {type(content).__name__}, not text"
            except urllib.error.HTTPError as error:
                problem = f"HTTP {error.code}"
                if error.code in (400, 401, 403, 404, 422):
                    break
            except (OSError, TimeoutError) as error:
                problem = f"no answer ({error})"
            except (ValueError, KeyError, IndexError, TypeError) as error:
                problem = f"not a chat completion ({type(error).__name__})"
        return "", problem

    def body(self, picture: Image.Image | None, text: str, temperature: float, seed: int) -> dict[str, Any]:
        content: list[dict[str, Any]] = [{"type": "text", "text": text}]
        if picture is not None:
            content.insert(0, {"type": "image_url", "image_url": {"url": data_url(picture)}})
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": temperature,
            "seed": seed,
            "max_tokens": self.asking.longest,
        }


PHRASES = {"nudity": ("naked person", "nude body"), "violence": ("blood", "wound", "person attacking with a weapon")}
"""The detector's phrases for the harms of the default policy."""


def open_labeler(spec: str, asking: Asking, opening: LoadOptions | None = None) -> Any:
    """The labeler that `kind:where` describes; an endpoint's key is read from GUARDPAINT_API_KEY.

    Of `opening`, the token and the device are used; a model goes to the GPU if there is one and no device is named.
    """
    opening = opening or LoadOptions()
    kind, _, where = spec.partition(":")
    if kind == "endpoint":
        url, _, model = where.partition("#")
        if not model:
            raise BadConfig(f"labeler {spec!r}: name the model after a #, as in endpoint:http://host:8000/v1#model")
        return EndpointLabeler(url, model, asking, key=os.environ.get("GUARDPAINT_API_KEY"))
    if kind == "vlm" and where:
        return on_machine(ChatLabeler.from_pretrained(where, asking, opening.token), opening)
    if kind == "shieldgemma" and where:
        return on_machine(ShieldLabeler.from_pretrained(where, asking.policy, opening.token), opening)
    if kind == "detector" and where:
        return on_machine(DetectorLabeler.from_pretrained(where, asking.policy, PHRASES, opening.token), opening)
    raise BadConfig(f"labeler {spec!r}: write vlm:MODEL, shieldgemma:MODEL, detector:MODEL or endpoint:URL#MODEL")
