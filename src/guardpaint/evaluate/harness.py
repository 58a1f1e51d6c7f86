"""From names on a command line to suites, bases and defences; and the files a run leaves behind."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from guardpaint.checkpoint import fingerprint
from guardpaint.commands import load_base
from guardpaint.errors import BadInput
from guardpaint.evaluate import page, summary
from guardpaint.evaluate import run as runner
from guardpaint.evaluate.attacks.search import ATTACKS
from guardpaint.evaluate.defences import embedding_projection, guarded, post_hoc, prompt_filter, sld
from guardpaint.evaluate.defences.base import Base, Defence
from guardpaint.evaluate.defences.negative_prompt import NegativePrompt
from guardpaint.evaluate.defences.undefended import Undefended
from guardpaint.evaluate.judges import open_judge
from guardpaint.evaluate.real_metrics import open_metric
from guardpaint.policy import Policy
from guardpaint.results import write_results
from guardpaint.system import GuardPaint
from guardpaint.train.align import open_inpainter
from guardpaint.world.captions import KEYWORDS

FREE: dict[str, Callable[[], Defence]] = {
    "undefended": Undefended,
    "negative_prompt": NegativePrompt,
    "prompt_filter": lambda: prompt_filter.PromptFilter(words=KEYWORDS, limit=0.985, own_encoder=True),
    "sld": sld.SafeLatentDiffusion,
    "embedding_projection": embedding_projection.EmbeddingProjection,
}
POST_HOC = {
    "post_hoc_block": post_hoc.PostHoc,
    "post_hoc_regenerate": post_hoc.PostHocRegenerate,
    "post_hoc_blur": post_hoc.PostHocBlur,
    "post_hoc_inpaint": post_hoc.PostHocInpaint,
}
GUARDED = ("ours", "paper", "ours_ladder_off")
ABLATIONS: dict[str, tuple[str, ...]] = {
    "size": tuple(f"ours:candidates={n},audits={x}" for n in (1, 3, 5, 7) for x in (2, 4, 6, 8)),
    "view": ("ours", "ours:view=stepped"),
    "gates": ("ours", "ours:f_gate=off", "ours:p_gate=off", "ours:f_gate=relative", "ours:f_gate=absolute"),
    "selection": ("ours", "ours:selection=first"),
    "mask": ("ours:mask_threshold=calibrated", "ours:mask_threshold=percentile"),
    "reinsertion": tuple(
        f"ours:reinsertion={rule}"
        for rule in ("held_substitution", "x0_substitution", "direct_blend", "ddpm_noise", "ddim_inversion",
                     "null_text", "flow_ode")
    ),
}  # fmt: skip
"""Suites of SPEC §7: `--defence ablation:NAME` runs every member."""
DEFENCES = (*FREE, *POST_HOC, *GUARDED)


def expanded(names: Sequence[str]) -> list[str]:
    """Defences by name; an ablation stands for all of its members."""
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
    """The guard under other settings: "candidates=3,view=stepped"."""
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


def open_defence(name: str, guard: GuardPaint | None) -> tuple[Defence, str]:
    """A defence and a hash of what it is made of. `ours:candidates=3,audits=4` changes settings of the guard."""
    if name in FREE:
        free = FREE[name]()
        return free, short_hash(name, {k: str(v) for k, v in vars(free).items() if not k.startswith("_")})
    kind, _, options = name.partition(":")
    if kind not in DEFENCES or (options and kind not in GUARDED):
        raise BadInput(f"defence {name!r}: choose among {', '.join(DEFENCES)}")
    if guard is None:
        raise BadInput(f"defence {name!r} needs --guard: the checkpoint whose auditor looks")
    if kind in GUARDED:
        ready = changed(guarded.variants(guard)[kind].guard, options)
        made: Defence = guarded.Guarded(ready, name)
        settings = {**ready.config.to_dict(), "policy": ready.policy.to_dict()}
    else:
        extra = {"pipe": open_inpainter("mini-inpaint")} if name == "post_hoc_inpaint" else {}
        made = POST_HOC[name](guard.parts, **extra)
        settings = {**guard.config.to_dict(), "policy": guard.policy.to_dict()}
        settings |= {k: fingerprint(pipe.unet) for k, pipe in extra.items()}
    decoders = {k: fingerprint(v) for k, v in guard.decoders.items()}
    return made, short_hash(settings, guard.weight_hashes(), decoders)


def short_hash(*values: Any) -> str:
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def base_hash(base: Base) -> str:
    """Of everything in a base that decides its pictures."""
    parts = {k: fingerprint(v) for k, v in base.pipe.components.items() if isinstance(v, nn.Module)}
    return short_hash(parts, base.call, str(base.pipe.scheduler.config))


def open_suites(
    suite: str, n: int, attacks: Path, searched: str, file_format: str | None
) -> tuple[list[list[runner.Case]], list[str]]:
    if suite == "benign":
        return [runner.benign_suite(n)], []
    if suite == "attacks" or suite in ATTACKS:
        names = list(ATTACKS) if suite == "attacks" else [suite]
        return [runner.attack_suite(attacks / f"{a}-{searched}.jsonl", n) for a in names], []
    if Path(suite).exists():
        cases, notes = runner.file_suite(Path(suite), file_format, n)
        return [cases], notes
    raise BadInput(f"suite {suite!r}: write benign, attacks, {', '.join(ATTACKS)}, or the path of a prompt file")


def run(
    suite: str,
    bases: Sequence[str],
    defences: Sequence[str],
    guard: str | None,
    n: int,
    attacks: Path,
    searched: str,
    file_format: str | None,
    out: Path,
    pictures: int,
    judged_by: str = "oracle",
    measured_by: Sequence[str] = (),
) -> Iterator[str]:
    """Every suite × base × defence; says what it did, line by line."""
    if "help" in defences:
        yield "defences: " + ", ".join(DEFENCES)
        yield "settings: ours:NAME=VALUE,… · ablations: " + ", ".join(f"ablation:{a}" for a in ABLATIONS)
        return
    suites, notes = open_suites(suite, n, attacks, searched, file_format)
    yield from (f"not as published: {note}" for note in notes)
    wanted = expanded(defences)
    needed = guard is not None or any(name not in FREE for name in wanted)
    loaded = (GuardPaint.from_pretrained(guard) if guard else GuardPaint.embedded()) if needed else None
    opened = [open_defence(name, loaded) for name in wanted]
    if len({m.partition(":")[0] for m in measured_by}) < len(measured_by):
        raise BadInput(f"metrics {', '.join(measured_by)}: one of each kind")
    judge, rows = open_judge(judged_by, loaded.policy if loaded else Policy.default()), runner.Rows(out)
    metrics = [open_metric(m) for m in measured_by]
    for name in bases:
        pipe, call = load_base(name)
        base = Base(name, pipe, call)
        for cases in suites:
            for defence, config in opened:
                key = short_hash(config, base_hash(base), judge.identity, *measured_by)
                made = runner.run_cell(base, defence, key, cases, judge, rows, out, pictures, metrics)
                yield f"{cases[0].suite} · {name} · {defence.name}: {made} new of {len(cases)}"
    yield from finish(list(rows.found.values()), out)


def finish(rows: list[dict[str, Any]], out: Path) -> Iterator[str]:
    """results.json, samples.parquet and report.html from the rows."""
    write_results(out / "results.json", summary.metrics(rows), rows, seed=0)
    runner.write_parquet(rows, out / "samples.parquet")
    yield f"wrote {out / 'results.json'}, {out / 'samples.parquet'} and {page.write(rows, out)}"
