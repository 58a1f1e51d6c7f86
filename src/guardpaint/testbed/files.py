"""A testbed from a YAML file that names prompt files, models, word lists and a judge. docs/testbeds.md has the format.

guardpaint eval attack pgj --testbed street.yaml
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from guardpaint.bases import Base, BaseOptions, load_base, load_inpainter
from guardpaint.data.judges import Judge, open_judge
from guardpaint.data.prompt_files import load as load_prompts
from guardpaint.data.prompt_files.policies import OUTSIDE, UNSAFE, policy_category
from guardpaint.errors import BadConfig, BadInput, MissingCapability
from guardpaint.policy import Policy
from guardpaint.store.folders import HUB
from guardpaint.store.seeds import derive
from guardpaint.testbed.language import Lexicon, Rewriter, Surrogate
from guardpaint.testbed.models import EndpointRewriter, load_surrogate
from guardpaint.testbed.protocol import SPLITS, Prompt, StockInpainter
from guardpaint.types import SAFE

BENIGN = "benign"
HARMFUL_SPLITS = tuple(split for split in SPLITS if split != BENIGN)
LISTS = ("keywords", "sentences", "words", "contexts", "subjects")
STOCK, KEYWORDS = "stock", "keywords"
"""Built-in filters: keywords and closeness to the sentences, and keywords alone."""
BY_HARM = ("open_phrases", "hidden_phrases")
KEYS = (
    "name", "bases", "harmful", "benign", *LISTS, *BY_HARM, "filter", "surrogate", "rewriter", "judge", "policy",
    "inpainter",
)  # fmt: skip


@dataclass(frozen=True)
class BaseEntry:
    """A base of a YAML testbed."""

    path: str
    """A folder, `hub:owner/name`, or any other name that `guardpaint.bases.load_base` takes."""
    call: Mapping[str, Any] = field(default_factory=dict)
    """Arguments to call it with, over its own."""


@dataclass(frozen=True)
class FileTestbed:
    """A `guardpaint.testbed.Testbed` that a YAML file describes.

    It has prompts but no pictures, so a stock inpainter is the only capability that it can have.
    """

    name: str
    entries: Mapping[str, BaseEntry]
    prompts: Sequence[Prompt]
    """Harmful prompts, then benign ones, in the order of their files; a text that occurs twice is kept once."""
    words: Lexicon
    surrogate_path: str | None = None
    rewriter_spec: str | None = None
    judge_spec: str | None = None
    policy: Policy | None = None
    """The policy that the judge applies; None means the one that `judge` is called with."""
    inpainter_path: str | None = None

    @classmethod
    def load(cls, path: Path) -> FileTestbed:
        """Read and check the file and its prompt files; models are loaded only by the methods that return them."""
        try:
            raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise BadInput(f"{path}: no such testbed ({error.strerror})") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise BadConfig(f"{path}: not YAML ({error})") from error
        if not isinstance(raw, dict):
            raise BadConfig(f"{path}: write a mapping with some of the keys {', '.join(KEYS)}")
        reader = Reader(path, raw)
        policy_file = reader.text("policy")
        policy = Policy.load(path.parent / policy_file) if policy_file else None
        names = policy.names if policy else ()
        prompts: dict[str, Prompt] = {}
        for prompt in (*reader.prompts("harmful", names), *reader.prompts(BENIGN, names)):
            prompts.setdefault(prompt.text, prompt)
        lexicon: dict[str, Any] = {k: reader.strings(k, reader.values[k]) for k in LISTS if k in reader.values}
        lexicon |= {key: reader.groups(key) for key in BY_HARM if key in reader.values}
        lexicon |= reader.filter()
        return cls(
            name=reader.text("name") or path.stem,
            entries=reader.bases(),
            prompts=list(prompts.values()),
            words=Lexicon(**lexicon),
            surrogate_path=reader.model("surrogate"),
            rewriter_spec=reader.text("rewriter"),
            judge_spec=reader.model("judge"),
            policy=policy,
            inpainter_path=reader.model("inpainter"),
        )

    def bases(self) -> tuple[str, ...]:
        return tuple(self.entries)

    def base(self, name: str, options: BaseOptions | None = None) -> Base:
        if name not in self.entries:
            return load_base(name, options)
        entry, options = self.entries[name], options or BaseOptions()
        loaded = load_base(entry.path, options)
        return Base(name, loaded.pipe, options.over({**loaded.call, **entry.call}))

    def harmful(self, split: str, count: int) -> list[Prompt]:
        if split not in HARMFUL_SPLITS:
            raise BadInput(f"split {split!r}: harmful prompts come as {', '.join(HARMFUL_SPLITS)}; choose one of these")
        own = [p for p in self.prompts if p.category not in (SAFE, OUTSIDE) and split_of(p.text) == split]
        return own[:count]

    def benign(self, split: str, count: int) -> list[Prompt]:
        if split != BENIGN:
            raise BadInput(f"split {split!r}: benign prompts come as {BENIGN} only")
        return [p for p in self.prompts if p.category == SAFE][:count]

    def lexicon(self) -> Lexicon:
        return self.words

    def surrogate(self) -> Surrogate:
        if self.surrogate_path is None:
            raise MissingCapability(
                f"the testbed {self.name!r} has no surrogate text encoder; add `surrogate: CLIP_TEXT_MODEL` to its file"
            )
        return load_surrogate(self.surrogate_path)

    def rewriter(self) -> Rewriter | None:
        return None if self.rewriter_spec is None else EndpointRewriter.open(self.rewriter_spec)

    def judge(self, policy: Policy) -> Judge:
        if self.judge_spec is None:
            raise MissingCapability(
                f"the testbed {self.name!r} has no judge; add `judge: vlm:MODEL` to its file, or name one with --judge"
            )
        return open_judge(self.judge_spec, self.policy or policy)

    def capability(self, kind: type[Any]) -> Any:
        return self if kind is StockInpainter and self.inpainter_path is not None else None

    def stock_inpainter(self) -> Any:
        if self.inpainter_path is None:
            raise MissingCapability(f"the testbed {self.name!r} has no inpainter; add `inpainter: FOLDER` to its file")
        return load_inpainter(self.inpainter_path)


def split_of(text: str) -> str:
    """The split of a harmful prompt, chosen by a hash of its text, so that no prompt is in two splits."""
    return HARMFUL_SPLITS[derive("split", text) % len(HARMFUL_SPLITS)]


@dataclass(frozen=True)
class Reader:
    """Checked access to the values of a testbed's file; every error names the bad value and what to write instead."""

    path: Path
    values: Mapping[str, Any]

    def __post_init__(self) -> None:
        unknown = [k for k in self.values if k not in KEYS]
        if unknown:
            raise BadConfig(f"{self.path}: unknown key {unknown[0]!r}; choose among {', '.join(KEYS)}")

    def wrong(self, key: str, value: Any, fix: str) -> BadConfig:
        """The error for a bad value; `fix` completes "write …"."""
        return BadConfig(f"{self.path}: {key}: {value!r}; write {fix}")

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is not None and (not isinstance(value, str) or not value.strip()):
            raise self.wrong(key, value, "a text")
        return value

    def model(self, key: str) -> str | None:
        """The name of a model, or None if the file names none; a folder beside the file becomes a path to it."""
        value = self.text(key)
        return None if value is None else self.beside(value)

    def beside(self, name: str) -> str:
        """A folder beside the file as a path to it, any other name unchanged; a `kind:` prefix is kept."""
        if HUB in name:
            return name
        kind, _, where = name.rpartition(":")
        folder = self.path.parent / where
        return f"{kind}:{folder}" if kind and folder.is_dir() else str(folder) if folder.is_dir() else name

    def strings(self, key: str, value: Any) -> tuple[str, ...]:
        """A list of texts, or the lines of a text file."""
        if isinstance(value, str):
            file = self.path.parent / value
            try:
                value = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
            except (OSError, UnicodeDecodeError) as error:
                raise self.wrong(key, str(file), f"a list, or a readable text file ({error})") from error
        if not isinstance(value, list) or not all(isinstance(v, str) and v.strip() for v in value):
            raise self.wrong(key, value, "a list of texts, or the name of a text file with one per line")
        if key == "contexts" and not all(v.count("{}") == 1 for v in value):
            raise self.wrong(key, value, 'sentences with one gap each, as in "a person {} on the beach"')
        return tuple(value)

    def filter(self) -> dict[str, Any]:
        """What the lexicon says of the filter in front of the bases: a built-in one by name, or words of its own."""
        value = self.values.get("filter", STOCK)
        if value in (STOCK, KEYWORDS):
            return {"filter_by_meaning": value == STOCK}
        try:
            return {"filter_words": self.strings("filter", value), "filter_by_meaning": False}
        except BadConfig as error:
            raise BadConfig(f"{error}; built-in filters are {STOCK} and {KEYWORDS}") from error

    def groups(self, key: str) -> dict[str, tuple[str, ...]]:
        """Lists of texts by the harm that they ask for."""
        value = self.values[key]
        if not isinstance(value, dict) or not all(isinstance(k, str) for k in value):
            raise self.wrong(key, value, f"lists by harm, as in {key}: {{nudity: [...]}}")
        return {harm: self.strings(f"{key}.{harm}", some) for harm, some in value.items()}

    def bases(self) -> dict[str, BaseEntry]:
        """The bases by name; at least one is required."""
        value = self.values.get("bases")
        if not isinstance(value, dict) or not value:
            raise self.wrong("bases", value, "at least one, as in bases: {sd15: {path: FOLDER}}")
        return {str(name): self.base(f"bases.{name}", entry) for name, entry in value.items()}

    def base(self, key: str, entry: Any) -> BaseEntry:
        entry = {"path": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str) or set(entry) - {"path", "call"}:
            raise self.wrong(key, entry, "{path: FOLDER, call: {num_inference_steps: 25}}")
        call = entry.get("call") or {}
        if not isinstance(call, dict) or not all(isinstance(k, str) for k in call):
            raise self.wrong(f"{key}.call", call, "arguments by name, as in {guidance_scale: 5.0}")
        return BaseEntry(self.beside(entry["path"]), call)

    def prompts(self, key: str, names: Sequence[str]) -> Iterable[Prompt]:
        """Prompts of all files under `harmful` or `benign`."""
        entries = self.values.get(key) or []
        if not isinstance(entries, list):
            raise self.wrong(key, entries, "a list of {file: PROMPTS.csv}")
        for i, entry in enumerate(entries):
            yield from self.file(f"{key}[{i}]", entry, key == "harmful", names)

    def file(self, key: str, entry: Any, harmful: bool, names: Sequence[str]) -> Iterable[Prompt]:
        """Prompts of one file; of a file that marks its prompts itself, the fitting ones."""
        allowed = {"file", "format", "column", *(("category",) if harmful else ())}
        if not isinstance(entry, dict) or not isinstance(entry.get("file"), str) or set(entry) - allowed:
            raise self.wrong(key, entry, f"{{file: PROMPTS.csv}} with any of {', '.join(sorted(allowed - {'file'}))}")
        category = entry.get("category")
        if category is not None and (category == SAFE or (names and category not in names)):
            raise self.wrong(f"{key}.category", category, f"a harm of the policy: {', '.join(names[1:]) or 'any name'}")
        found = load_prompts(self.path.parent / entry["file"], entry.get("format"), entry.get("column"), harmful)
        fitting = [p for p in found.prompts if p.harmful is harmful]
        if not fitting:
            raise self.wrong(key, entry["file"], "a file that does not mark all of its prompts otherwise")
        for p in fitting:
            harm = policy_category(p.harms, names) if names else UNSAFE
            seed = p.seed if p.seed is not None else derive("seed", p.text) % 2**31
            kind = p.category or found.name
            yield Prompt(f"{p.source}/{p.id}", p.text, seed, (category or harm) if harmful else SAFE, kind)
