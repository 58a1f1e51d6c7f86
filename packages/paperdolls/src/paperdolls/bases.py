"""The embedded models: five small bases of the real diffusers classes, an inpainter, and a guard for them.

Autoencoders, tokenizers and shared text encoders are stored once in `assets/`. The folder of a base links to them, so
that `DiffusionPipeline.from_pretrained(folder)` loads it like any other pipeline.
"""

from __future__ import annotations

import csv
import os
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from guardpaint.config import Calibration
from guardpaint.draft.loading import LORA, fuse, load_pipeline
from guardpaint.errors import BadInput
from guardpaint.policy import Policy
from guardpaint.store.checkpoint import read_json, write_atomic, write_json
from paperdolls.files import ASSETS

NAMES = ("mini-sd", "mini-sdxl", "mini-sd3", "mini-sd3-turbo", "mini-flux")
"""The text-to-image bases. The order matters: it decides which seeds the views of a base use."""
INPAINTER = "mini-inpaint"
AUDITOR, SAFE_INPAINTER, FEW_STEPS = "mini-auditor", "mini-inpaint-safe", "mini-inpaint-few"
PROPOSER, RANKER = "mini-proposer", "mini-ranker"
GUARD = ASSETS / "guard"
"""Folder of the default guard: its policy, its settings and links to its components."""
FAST_GUARD = ASSETS / "guard-fast"
"""Folder of the guard with cheap repairs: the default one's parts, but for the LoRA of its inpainter."""
TINY = {"sd": "tiny4", "sdxl": "tiny4", "sd3": "tiny16", "flux": "tiny4"}
"""The tiny decoder of each family's latent space."""
INDEX = "model_index.json"
PARENT = {"mini-sd3-turbo": "mini-sd3", SAFE_INPAINTER: INPAINTER, FEW_STEPS: INPAINTER}
"""Models that are a LoRA, and the model that each of them is applied to."""


def shipped() -> tuple[str, ...]:
    """The text-to-image bases that are in the assets."""
    return tuple(name for name in NAMES if any((ASSETS / name / f).exists() for f in (INDEX, LORA)))


def folder(name: str) -> Path:
    """The folder of an embedded pipeline or LoRA."""
    path = ASSETS / name
    if not any((path / f).exists() for f in (INDEX, LORA)):
        have = ", ".join(p.parent.name for p in sorted(ASSETS.glob(f"*/{INDEX}")) + sorted(ASSETS.glob(f"*/{LORA}")))
        raise BadInput(f"embedded model {name!r}: not shipped; choose one of {have}")
    return path


@dataclass(frozen=True)
class MiniBase:
    """An embedded base; implements `guardpaint.bases.NamedBase`."""

    name: str
    inpaints: bool = False

    def load(self) -> Any:
        """The pipeline in fp32, with its progress bar off."""
        where = folder(self.name)
        low_rank = (where / LORA).exists()
        pipe = load_pipeline(folder(PARENT[self.name]) if low_rank else where)
        if low_rank:
            fuse(pipe, where)
        return pipe

    def call(self) -> dict[str, Any]:
        """The call settings that the model was trained for: steps, guidance, text length, size."""
        return dict(read_json(folder(self.name) / "card.json")["settings"])


mini_sd, mini_sdxl, mini_sd3, mini_sd3_turbo, mini_flux = map(MiniBase, NAMES)
mini_inpaint = MiniBase(INPAINTER, inpaints=True)


def guard_folder() -> Path:
    """Folder of the embedded guard."""
    return GUARD


def fast_guard_folder() -> Path:
    """Folder of the embedded guard with cheap repairs."""
    return FAST_GUARD


def same(a: Path, b: Path) -> bool:
    """Whether two folders hold the same weights or, without weights, the same vocabulary. Other files may differ."""
    weights = sorted(p.name for p in a.glob("*.safetensors"))
    files = weights or [p.name for p in a.iterdir() if p.name in ("tokenizer.json", "vocab.json", "merges.txt")]
    return bool(files) and all((b / f).exists() and same_file(a / f, b / f) for f in files)


def same_file(a: Path, b: Path) -> bool:
    """Whether two files have the same bytes, or the same tensors in another order."""
    if a.suffix != ".safetensors" or a.stat().st_size != b.stat().st_size:
        return a.read_bytes() == b.read_bytes()
    from safetensors.torch import load_file

    one, two = load_file(a), load_file(b)
    return one.keys() == two.keys() and all(bool((one[k] == two[k]).all()) for k in one)


def check_size(auditor: Path, size: int) -> dict[str, Any]:
    """The settings of a saved auditor; raises BadInput unless it was trained at this size."""
    settings: dict[str, Any] = read_json(auditor / "config.json")
    if size not in settings.get("sizes", ()):
        raise BadInput(
            f"size {size}: choose one at which the auditor in {auditor} was trained: {settings.get('sizes')}"
        )
    return settings


def one_size(auditor: Path, size: int) -> None:
    """Make a saved auditor use one size for both its coarse and its fine audits, and record that in its card."""
    settings = check_size(auditor, size)
    write_json(auditor / "config.json", {**settings, "sizes": [size, size]})
    write_json(auditor / "card.json", {**read_json(auditor / "card.json"), "looks_at": size})


def adopt(run: Path, name: str, assets: Path = ASSETS) -> list[str]:
    """Copy a finished run's model into the assets; parts that are there already become links.

    Returns a line of text for each link.
    """
    source, target = run / "model", assets / name
    if not any((source / f).exists() for f in (INDEX, LORA, "config.json")):
        raise BadInput(f"{run}: no finished model in {source}; has the run reached its last step?")
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(source, target)
    linked = []
    words = sorted(assets.glob("mini-*/tokenizer*"))
    for part in sorted(p for p in target.iterdir() if p.is_dir()):
        for other in (*sorted(assets.iterdir()), *sorted(assets.glob("mini-*/text_encoder*")), *words):
            mine = other == target or target in other.parents
            if not mine and other.is_dir() and not other.is_symlink() and same(part, other):
                shutil.rmtree(part)
                part.symlink_to(os.path.relpath(other, target), target_is_directory=True)
                linked.append(f"{part.name} → {os.readlink(part)}")
                break
    for extra in ("samples.png", "samples.txt"):
        if (run / extra).exists():
            shutil.copy(run / extra, target / extra)
    loss_curve(run / "loss.csv", target)
    return linked


def loss_curve(log: Path, target: Path, points: int = 200) -> None:
    """Write the run's loss, averaged over at most `points` intervals, as a CSV and, with matplotlib, as a plot."""
    if not log.exists():
        return
    with log.open(newline="") as file:
        rows = [(int(r["step"]), float(r["loss"])) for r in csv.DictReader(file)]
    size = max(1, -(-len(rows) // points))
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    curve = [(part[-1][0], sum(loss for _, loss in part) / len(part)) for part in parts]
    text = "step,loss\n" + "".join(f"{step},{loss:.5f}\n" for step, loss in curve)
    (target / "loss.csv").write_text(text, encoding="utf-8")
    if find_spec("matplotlib") is not None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5, 3), layout="constrained")
        axis = figure.subplots()
        axis.plot(*zip(*curve, strict=True), color="#4477aa")
        axis.set(xlabel="step", ylabel="loss", yscale="log", title=target.name)
        figure.savefig(target / "loss.png", dpi=90)


LEAST_LEVEL = 0.02
"""A calibrated mask level below this is not used: it would mask whole pictures."""


def calibrated_settings(calibration: Calibration) -> dict[str, Any]:
    """The settings that the default guard takes from a calibration.

    Only the last band keeps its thresholds. The verdict on the finished picture decides what is missed; tighter
    thresholds in earlier bands, whose views are hard to read, would only add false alarms. Bands whose own mask level
    is not usable take that of finished pictures; if that is not usable either, the guard keeps masking by percentile.
    """
    values = calibration.to_dict()
    for band in values["bands"][:-1]:
        band["thresholds"] = dict.fromkeys(band["thresholds"], 1.0)
    finished = values["bands"][-1]["mask_level"]
    if finished is None or finished < LEAST_LEVEL:
        return {"calibration": values}
    for band in values["bands"]:
        usable = band["mask_level"] is not None and band["mask_level"] >= LEAST_LEVEL
        band["mask_level"] = band["mask_level"] if usable else None
    return {"calibration": values, "mask_threshold": "calibrated", "mask_level": finished}


def assemble_guard(
    settings: dict[str, Any], assets: Path = ASSETS, proposer: str = "uniform", knobs: dict[str, Any] | None = None
) -> Path:
    """Write the default guard from the auditor, the inpainter and the tiny decoders in the assets; return its folder.

    The proposer is `learned` (the one in the assets), `uniform`, or any other name with fixed `knobs`. A ranker in the
    assets is included; the setting `keep` decides whether it is used.
    """
    guard = assets / GUARD.name
    parts = {"auditor": AUDITOR}
    decoders = sorted(family for family, tiny in TINY.items() if (assets / tiny).exists())
    parts |= {f"decoders/{family}": TINY[family] for family in decoders}
    pieces = [p for p in sorted((assets / INPAINTER).glob("*")) if p.is_dir() or p.name == INDEX]
    parts |= {f"repairer/{p.name}": f"{INPAINTER}/{p.name}" for p in pieces}
    if (assets / SAFE_INPAINTER / LORA).exists():
        parts[f"repairer/{LORA}"] = f"{SAFE_INPAINTER}/{LORA}"
    parts |= {"proposer": PROPOSER} if proposer == "learned" else {}
    ranked = bool(settings.get("keep")) or (assets / RANKER).exists()
    parts |= {"ranker": RANKER} if ranked else {}
    for name in parts.values():
        if not (assets / name).exists():
            raise BadInput(
                f"the default guard needs {assets / name}; train {name} and copy it there with `guardpaint world adopt`"
            )
    if guard.exists():
        shutil.rmtree(guard)
    for link, name in parts.items():
        path = guard / link
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(assets / name, path.parent), target_is_directory=(assets / name).is_dir())
    write_atomic(guard / "policy.yaml", yaml.safe_dump(Policy.default().to_dict(), sort_keys=False).encode())
    manifest = {"version": 1, "config": settings, "decoders": decoders, "repairer": "inpainter"}
    manifest |= {"proposer": proposer, "ranker": ranked} | ({"knobs": knobs} if knobs else {})
    write_json(guard / "guardpaint.json", manifest)
    return guard


FEW = {"steps": 4, "guidance": 1.0}
"""How the distilled inpainter is sampled."""


def assemble_fast_guard(changes: dict[str, Any], assets: Path = ASSETS) -> Path:
    """Write the guard with cheap repairs from the default one, with the distilled LoRA and some settings changed."""
    guard, fast = assets / GUARD.name, assets / FAST_GUARD.name
    if not (assets / FEW_STEPS / LORA).exists():
        raise BadInput(f"the fast guard needs {assets / FEW_STEPS}; train {FEW_STEPS} and copy its model there")
    if fast.exists():
        shutil.rmtree(fast)
    shutil.copytree(guard, fast, symlinks=True)
    lora = fast / "repairer" / LORA
    lora.unlink()
    lora.symlink_to(f"../../{FEW_STEPS}/{LORA}")
    manifest = read_json(guard / "guardpaint.json")
    config = {**manifest["config"], **changes}
    write_json(fast / "guardpaint.json", {**manifest, "config": config, "repairer_options": FEW})
    return fast


def megabytes(assets: Path = ASSETS) -> float:
    """Size of all files in the assets, in megabytes; what is behind a link counts once."""
    return sum(p.stat().st_size for p in assets.rglob("*") if p.is_file() and not linked_to(p, assets)) / 1e6


GUARD_PARTS = (GUARD.name, FAST_GUARD.name, AUDITOR, SAFE_INPAINTER, FEW_STEPS, PROPOSER, RANKER)
"""Assets of the guard; all others belong to the world."""


def world_megabytes(assets: Path = ASSETS) -> float:
    """Size of the weights of the world's models in megabytes, without those of the guard."""
    files = (p for p in assets.rglob("*.safetensors") if p.is_file() and not linked_to(p, assets))
    return sum(p.stat().st_size for p in files if p.relative_to(assets).parts[0] not in GUARD_PARTS) / 1e6


def linked_to(path: Path, root: Path) -> bool:
    """Whether the path below `root` is a link or lies behind one."""
    return any(p.is_symlink() for p in (path, *path.parents) if root in p.parents)
