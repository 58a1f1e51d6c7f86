"""Open defences by the names that `guardpaint eval run --defence` takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from guardpaint.draft.loading import on_machine
from guardpaint.errors import BadInput
from guardpaint.evaluate.defences import embedding_projection, guarded, post_hoc, prompt_filter, sld
from guardpaint.evaluate.defences.base import Defence
from guardpaint.evaluate.defences.negative_prompt import NegativePrompt
from guardpaint.evaluate.defences.stock_checker import StockCheckerDefence
from guardpaint.evaluate.defences.undefended import Undefended
from guardpaint.evaluate.defences.world_filter import world_filter
from guardpaint.evaluate.evaluated_base import StockChecker
from guardpaint.guard import GuardPaint
from guardpaint.repair.pipeline import PipelineRepairer
from guardpaint.store.checkpoint import fingerprint, short_hash
from guardpaint.testbed import StockInpainter, Testbed, need, open_testbed
from guardpaint.testbed.language import Lexicon

FREE: dict[str, Callable[[], Defence]] = {
    "undefended": Undefended,
    "negative_prompt": NegativePrompt,
    "prompt_filter": prompt_filter.PromptFilter,  # with the lexicon of the testbed
    "sld": sld.SafeLatentDiffusion,
    "embedding_projection": embedding_projection.EmbeddingProjection,
    "stock_checker": StockCheckerDefence,
}
POST_HOC = {
    "post_hoc_block": post_hoc.PostHoc,
    "post_hoc_regenerate": post_hoc.PostHocRegenerate,
    "post_hoc_blur": post_hoc.PostHocBlur,
    "post_hoc_inpaint": post_hoc.PostHocInpaint,
}
GUARDED = ("ours", "paper", "ours_ladder_off")
WITH_PART = ("stock_checker", "post_hoc_inpaint")
"""Defences that take a part by its folder, as in `post_hoc_inpaint@FOLDER`; the defence keeps its short name."""
ABLATIONS: dict[str, tuple[str, ...]] = {
    "size": tuple(f"ours:candidates={n},audits={x}" for n in (1, 3, 5, 7) for x in (2, 4, 6, 8)),
    "size_trajectory": tuple(  # without repairs of the finished picture
        f"ours_ladder_off:candidates={n},audits={x},final_repair=off" for n in (1, 3, 5, 7) for x in (2, 4, 6, 8)
    ),
    "view": ("ours", "ours:view=stepped"),
    "gates": ("ours", "ours:f_gate=off", "ours:p_gate=off", "ours:f_gate=relative", "ours:f_gate=absolute"),
    "selection": ("ours", "ours:selection=first"),
    "moment": ("ours", "ours:audits=1,audit_start=1.0"),  # audits the last step only
    "mask": ("ours:mask_threshold=calibrated", "ours:mask_threshold=percentile"),
    "reinsertion": tuple(
        f"ours:reinsertion={rule},audits=8"  # audits from 70 % on: in the last steps rules hardly differ
        for rule in ("held_substitution", "x0_substitution", "direct_blend", "ddpm_noise", "ddim_inversion",
                     "null_text", "flow_ode")
    ),
}  # fmt: skip
"""Sets of defences to compare: `--defence ablation:NAME` runs every member."""
DEFENCES = (*FREE, *POST_HOC, *GUARDED)


@cache
def open_guard(name: str | None) -> GuardPaint:
    """A guard from a folder or the hub, or the embedded one; each is loaded once."""
    return GuardPaint.from_pretrained(name) if name else GuardPaint.embedded()


def expanded(names: Sequence[str]) -> list[str]:
    """Names of defences, each once, with every ablation replaced by its members."""
    out: list[str] = []
    for name in names:
        kind, _, which = name.partition(":")
        if kind == "ablation":
            if which not in ABLATIONS:
                raise BadInput(f"ablation {which!r}: choose among {', '.join(ABLATIONS)}")
            out += ABLATIONS[which]
        else:
            out.append(name)
    return list(dict.fromkeys(out))


def changed(guard: GuardPaint, text: str) -> GuardPaint:
    """The guard with other settings, written as "candidates=3,view=stepped"."""
    settings: dict[str, Any] = {}
    known = guard.config.to_dict()
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in known or not value:
            raise BadInput(f"setting {part!r}: write NAME=VALUE with a setting of the guard's configuration")
        kind = type(known[name])
        try:
            settings[name] = kind(value) if kind in (int, float) else value
        except ValueError as error:
            raise BadInput(f"setting {part!r}: {name} is a number") from error
    return guard.configured(**settings)


def kind_and_part(name: str) -> tuple[str, str]:
    """The kind of a defence, and the folder of its part if it is one of `WITH_PART`."""
    kind, _, folder = name.partition("@")
    return (kind, folder) if kind in WITH_PART else (name, "")


def needs_guard(name: str) -> bool:
    """Whether a defence uses a guard."""
    return kind_and_part(name)[0] not in FREE


def open_defence(
    name: str, guard: GuardPaint | None, testbed: Callable[[], Testbed] | None = open_testbed
) -> tuple[Defence, str]:
    """A defence and a hash of its settings and weights.

    The hash of a baseline includes the source of its file. The code of the guard is in no hash; rows name its revision.

    `ours:candidates=3,audits=4` changes settings of the guard; `ours@DIR` takes the guard of that folder. The testbed
    is opened only by defences that need one: the prompt filter its lexicon, `post_hoc_inpaint` its inpainter. Without a
    testbed (None) the filter forbids its own words, and the inpainter has to be named.
    """
    name, part = kind_and_part(name)
    if name == "stock_checker" and part:
        checker = StockChecker.from_pretrained(part)
        return StockCheckerDefence(checker), short_hash(name, checker.digest())
    if name in FREE:
        free = FREE[name]()
        if name == "prompt_filter":
            free = world_filter(testbed().lexicon() if testbed else Lexicon())
        fields = {k: str(v) for k, v in vars(free).items() if not k.startswith("_")}
        return free, short_hash(name, fields, inspect.getsource(inspect.getmodule(type(free)) or type(free)))
    whole, _, options = name.partition(":")
    kind, _, folder = whole.partition("@")
    if kind not in DEFENCES or ((options or folder) and kind not in GUARDED):
        raise BadInput(f"defence {name!r}: choose among {', '.join(DEFENCES)}")
    if folder:
        guard = open_guard(str(Path(folder).resolve()) if Path(folder).is_dir() else folder)
    if guard is None:
        raise BadInput(f"defence {name!r} needs --guard, the checkpoint of the guard whose auditor it uses")
    hashed = guard
    if kind in GUARDED:
        variant = guarded.variants(guard)[kind]
        hashed = ready = changed(variant.guard, options)
        own_rule = any(o.startswith("reinsertion=") for o in options.split(","))
        rules = None if own_rule else variant.reinsertion
        defence: Defence = replace(variant, guard=ready, name=name, reinsertion=rules)
        used = [type(part).__name__ for part in (ready.parts.repairer, ready.parts.proposer)]
        settings = {**ready.config.to_dict(), "policy": ready.policy.to_dict(), "rules": rules, "parts": used}
    else:
        extra: dict[str, Any] = {}
        if name == "post_hoc_inpaint" and part:
            extra["repairer"] = on_machine(PipelineRepairer.from_pretrained(part))
        elif name == "post_hoc_inpaint":
            if testbed is None:
                raise BadInput("post_hoc_inpaint needs a repairer; name it as in post_hoc_inpaint@FOLDER")
            extra["pipe"] = need(testbed(), StockInpainter, "the defence post_hoc_inpaint").stock_inpainter()
        defence = POST_HOC[name](guard.parts, **extra)
        settings = {**guard.config.to_dict(), "policy": guard.policy.to_dict(), "code": inspect.getsource(post_hoc)}
        settings |= {k: p.digest() if k == "repairer" else fingerprint(p.unet) for k, p in extra.items()}
    decoders = {k: fingerprint(v) for k, v in guard.decoders.items()}
    return defence, short_hash(settings, hashed.weight_hashes(), list(guard.parts.auditor.sizes), decoders)
