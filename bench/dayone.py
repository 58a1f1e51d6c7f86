"""What the parts that need no training do here: docs/results/dayone.json.

    python bench/dayone.py [--part photos --part calls --part roundtrip --part doors --part presets --part times]

`photos`: open_nsfw on harmless photographs and crops of them, before and after `calibrate` on the other photographs.
`calls`: whole guarded calls on embedded bases with open_nsfw and native repair; audits inside the loop have a threshold
so low that pictures trigger, and finished pictures the publisher's, so that they reach the approver.
`roundtrip`: guards
of every kind of part saved, loaded in another process, and drawn with.
`doors`: the same guards at the command line, behind the service called by openai's client, and on Ray
if it is installed.
`presets`: a guarded call with each preset; models that cannot be had here are small random ones of the same classes.
`times`: one audit beside the stock checker's architecture; wants an idle machine. Recall is not measured: there are no
unsafe pictures here.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from dayone_doors import doors
from dayone_results import OUT, write
from PIL import Image

from guardpaint.bases import load_base
from guardpaint.config import Band, Calibration
from guardpaint.evaluate.picture_calibration import Goals, choose, raw_scores
from guardpaint.guard import GuardPaint
from guardpaint.parts import presets
from guardpaint.parts.presets import EMBEDDED, PRESETS
from guardpaint.repair.native import NativeRepairer
from guardpaint.store.results import require_clean
from guardpaint.testing import small, small_detectors, small_inpainters, small_vlms
from guardpaint.testing.photographs import FITTED, HELD_OUT, photograph

Row = dict[str, Any]
CROPS = (1.0, 0.7, 0.5)
"""Sides of the crops of a photograph, as shares of its shorter side."""
PLACES = ((0.5, 0.5), (0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0))
ALARMS = 0.1
"""Goal of the calibration: with nine photographs nothing lower can be promised."""
FORCED = 1e-4
"""Threshold at which nearly every unfinished picture of the embedded bases triggers."""
PROMPTS = ("a person in a park", "two people on a beach", "a person in a kitchen", "a person in the snow")


def crops(image: Image.Image) -> list[Image.Image]:
    """The whole photograph, and squares of two sizes at five places."""
    found = [image]
    for share in CROPS[1:]:
        side = round(min(image.size) * share)
        for x, y in PLACES:
            left, top = round((image.width - side) * x), round((image.height - side) * y)
            found.append(image.crop((left, top, left + side, top + side)))
    return found


def photos() -> list[Row]:
    """The raw score of every crop, and the level that calibration on the other photographs gives."""
    from guardpaint.audit.open_nsfw import OnnxAuditor
    from guardpaint.store.images import from_pil

    auditor = OnnxAuditor.from_pretrained()
    scores: dict[str, list[float]] = {}
    for name in (*FITTED, *HELD_OUT):
        views = [from_pil(c)[None] for c in crops(photograph(name))]
        audits = [auditor.audit(v, [None], 0.0)[0] for v in views]
        scores[name] = [raw_scores(a.probs, auditor.levels)["nudity"] for a in audits]
    published = auditor.levels["nudity"]
    rows = []
    for name, own in scores.items():
        others = [max(values) for other, values in scores.items() if other != name]
        level, why = choose(others, (), published, Goals(alarms=ALARMS), "nudity")
        rows += [
            {"photograph": name, "crop": i, "score": s, "published": published, "level": level, "why": why}
            for i, s in enumerate(own)
        ]
    return rows


def forced_inside() -> Calibration:
    """Thresholds that nobody calibrated: a forced one before the end, and none but the policy's at the end."""
    bands = Band(0.0, {"nudity": FORCED}, None, {}), Band(1.0, {}, None, {})
    return Calibration(0.5, 0.5, "forced", bands)


def calls() -> list[Row]:
    """Guarded pictures of three bases with forced triggers inside the loop."""
    from guardpaint.audit.approvers import SecondLook
    from guardpaint.audit.open_nsfw import OnnxAuditor

    rows = []
    for name in ("mini-sdxl", "mini-sd3", "mini-flux"):
        base = load_base(name)
        policy = presets.policy_of(PRESETS["nudity-lite"])
        auditor, approver = OnnxAuditor.from_pretrained(), SecondLook(OnnxAuditor.from_pretrained())
        guard = GuardPaint(auditor, NativeRepairer(), approver=approver, policy=policy)
        guard = guard.configured(audits=2, calibration=forced_inside())
        twin = guard.attach(base.pipe)
        for i, prompt in enumerate(PROMPTS):
            report = twin(prompt, generator=torch.Generator().manual_seed(i), **base.call).safety[0]
            tournaments = [t for s in report.steps for t in s.tournaments]
            rows.append(
                {
                    "base": name,
                    "seed": i,
                    "status": str(report.status),
                    "triggered": report.triggered,
                    "tournaments": len(tournaments),
                    "accepted": sum(t.winner is not None for t in tournaments),
                    "approvals": len(report.final.approvals),
                    "errors": "; ".join(report.errors),
                    "complete": bool(report.steps) and report.final.verdict != "none",
                }
            )
            print(rows[-1], flush=True)
    return rows


LOADED = """
import json, sys, torch
from guardpaint.guard import GuardPaint
from guardpaint.testing import small
guard = GuardPaint.from_pretrained(sys.argv[1])
pipe = guard.attach(small.pipeline(sys.argv[2]))
size = {"height": small.PIXELS, "width": small.PIXELS, "num_inference_steps": 2}
report = pipe("a quiet street", generator=torch.Generator().manual_seed(0), **size).safety[0]
print(json.dumps({"hashes": guard.weight_hashes(), "errors": report.errors, "status": str(report.status)}))
"""


def guards() -> dict[str, Callable[[], GuardPaint]]:
    """A guard with each kind of part; models are small random ones, open_nsfw is real."""
    from guardpaint.audit.approvers import ApproverEnsemble, Cascade, SecondLook
    from guardpaint.audit.classifier import ClassifierAuditor
    from guardpaint.audit.ensemble import Ensemble
    from guardpaint.audit.open_nsfw import OnnxAuditor
    from guardpaint.audit.zero_shot import ZeroShotAuditor
    from guardpaint.data.approver import VlmApprover
    from guardpaint.policy import Policy
    from guardpaint.repair.pipeline import PipelineRepairer

    lite, whole = presets.policy_of(PRESETS["nudity-lite"]), Policy.default()
    labels = {"normal": "safe", "nsfw": "nudity", "gore": "violence"}

    def saved(pair: tuple[Any, Any]) -> Path:
        return small_detectors.saved(pair, Path(tempfile.mkdtemp()))

    def classifier() -> Any:
        return ClassifierAuditor.from_pretrained(saved(small_detectors.classifier("vit")), labels=labels)

    def inpainting(kind: str) -> Any:
        folder = Path(tempfile.mkdtemp())
        small_inpainters.inpainting(kind).save_pretrained(folder)
        return PipelineRepairer.from_pretrained(folder)

    def zero_shot(segmenter: bool) -> Any:
        maps = saved(small_detectors.clipseg()) if segmenter else None
        return ZeroShotAuditor.from_pretrained(saved(small_detectors.siglip()), policy=whole, segmenter=maps)

    def vlm() -> Any:
        return VlmApprover.from_pretrained(policy=whole, labeler=f"vlm:{saved(small_vlms.llava())}")

    native = NativeRepairer()
    nsfw = OnnxAuditor.from_pretrained
    return {
        "open_nsfw + native": lambda: GuardPaint(nsfw(), native, policy=lite),
        "classifier + native": lambda: GuardPaint(classifier(), native, policy=whole),
        "ensemble, approver ensemble": lambda: GuardPaint(
            Ensemble([nsfw(), classifier()]),
            native,
            approver=ApproverEnsemble([SecondLook(nsfw()), SecondLook(classifier())]),
            policy=whole,
        ),
        "zero-shot": lambda: GuardPaint(zero_shot(segmenter=False), native, policy=whole),
        "zero-shot, CLIPSeg maps": lambda: GuardPaint(zero_shot(segmenter=True), native, policy=whole),
        "VLM approver": lambda: GuardPaint(classifier(), native, approver=vlm(), policy=whole),
        "cascade": lambda: GuardPaint(
            classifier(), native, approver=Cascade(SecondLook(classifier()), SecondLook(nsfw())), policy=whole
        ),
        "SDXL inpainting": lambda: GuardPaint(classifier(), inpainting("sdxl"), policy=whole),
        "FLUX Fill": lambda: GuardPaint(classifier(), inpainting("flux-fill"), policy=whole),
        "trained": lambda: small.guard(),
    }


def roundtrip() -> list[Row]:
    """Every guard saved, loaded in another process, and drawn with."""
    rows = []
    for name, make in guards().items():
        with tempfile.TemporaryDirectory() as place:
            guard = make()
            guard.save_pretrained(place)
            done = subprocess.run([sys.executable, "-c", LOADED, place, "sd"], capture_output=True, text=True)
            answer = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
        same = answer.get("hashes") == guard.weight_hashes()
        rows.append(
            {"guard": name, "ok": same and not answer["errors"], "error": done.stderr[-300:] if not same else ""}
        )
        print(rows[-1], flush=True)
    return rows


def preset_calls() -> list[Row]:
    """A guarded call with every preset that can be put together; the hub is a folder of small random models."""
    import huggingface_hub

    with tempfile.TemporaryDirectory() as place:
        folders = {
            presets.SIGLIP.repo: small_detectors.saved(small_detectors.siglip(), Path(place) / "siglip"),
            presets.CLIPSEG.repo: small_detectors.saved(small_detectors.clipseg(), Path(place) / "clipseg"),
            presets.FALCONSAI.repo: small_detectors.saved(
                small_detectors.classifier("vit", ("normal", "nsfw")), Path(place) / "vit"
            ),
            presets.SDXL_INPAINTING.repo: Path(place) / "sdxl",
        }
        sdxl = small_inpainters.inpainting("sdxl")
        sdxl.save_pretrained(Path(place) / "sdxl")
        folders[presets.LCM_SDXL.repo] = small_inpainters.random_lora(sdxl, Path(place) / "lcm")
        for family, model in presets.TAESD.items():
            folders[model.repo] = Path(place) / model.repo
            small.tiny_decoder(small.LATENT_CHANNELS[family]).save_pretrained(folders[model.repo])
        snapshot, one = (
            (lambda repo, **more: str(folders[repo])),
            (lambda repo, file, **more: str(folders[repo] / file)),
        )
        with (
            patch.object(huggingface_hub, "snapshot_download", snapshot),
            patch.object(huggingface_hub, "hf_hub_download", one),
        ):
            rows = []
            for name, preset in PRESETS.items():
                ok, error = False, preset.note
                embedded = name in EMBEDDED
                if preset.build is not None or embedded:
                    base = load_base("mini-sd" if embedded else "tiny-sd")
                    size = dict(base.call) if embedded else {**base.call, "num_inference_steps": 3}
                    guard = GuardPaint.from_preset(name)
                    report = guard.attach(base.pipe)(
                        "a person", generator=torch.Generator().manual_seed(0), **size
                    ).safety[0]
                    ok, error = report.final.verdict != "none" and not report.errors, "; ".join(report.errors)
                rows.append({"preset": name, "verified": preset.verified, "ok": ok, "error": error})
                print(rows[-1], flush=True)
    return rows


def times(repeats: int = 7) -> list[Row]:
    """One audit by open_nsfw with its map, and one pass of a ViT-L/14 image tower at 224 px, in turn."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    from guardpaint.audit.open_nsfw import OnnxAuditor

    checker = CLIPVisionModelWithProjection(
        CLIPVisionConfig(
            hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, patch_size=14,
            image_size=224, projection_dim=768,
        )
    ).eval()  # fmt: skip
    auditor = OnnxAuditor.from_pretrained()
    picture, pixels = torch.rand(1, 3, 512, 512), torch.rand(1, 3, 224, 224)
    with torch.no_grad():
        works: dict[str, Callable[[], Any]] = {
            "audit": lambda: auditor.audit(picture, [None], 0.0),
            "stock_checker": lambda: checker(pixels),
        }
        for work in works.values():
            work()
        rows = []
        for run in range(repeats):
            for part, work in works.items():
                began = time.perf_counter()
                work()
                rows.append({"timed": part, "run": run, "seconds": time.perf_counter() - began})
    return rows


PARTS: dict[str, Callable[[], list[Row]]] = {
    "photos": photos, "calls": calls, "roundtrip": roundtrip, "doors": lambda: doors(guards()),
    "presets": preset_calls, "times": times,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=list(PARTS), help="repeat (default: all)")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    require_clean(args.out)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for part in args.part or PARTS:
        for name, m in write(part, PARTS[part](), args.out).items():
            print(f"{name:36} {m['value']} n {m['n']} {m.get('note', '')}", flush=True)


if __name__ == "__main__":
    main()
