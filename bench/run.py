"""Measure cost ratios of the guard at full SD 1.5 size (512², random weights), in one run on one machine.

    python bench/run.py --out docs/results/bench.json        (about 25 minutes on an idle machine)
    python bench/run.py --embedded-only --out out/bench.json   (the small models only, a minute)

Absolute seconds depend on the machine; every reported number is a ratio of parts timed side by side.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import tournaments

from guardpaint.audit.model import AuditorConfig, AuditorScorer
from guardpaint.draft.schedule import sd_scheduler
from guardpaint.guard import GuardPaint
from guardpaint.policy import Policy
from guardpaint.repair.inpainter import Inpainter
from guardpaint.repair.knobs import FixedProposer
from guardpaint.store.results import metric, require_clean, write_results
from guardpaint.testing import small
from guardpaint.testing.doubles import FlagsBright, PaintsFlat
from guardpaint.types import Audit, Knobs, RepairRequest

STEPS = 50
CALLS = 5


class Rows(list):
    """Raw measurements, printed as they come."""

    def time(self, name: str, work: Callable[[], Any], repeats: int) -> float:
        """Median seconds over `repeats` runs."""
        seconds = []
        for i in range(repeats):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
            self.append({"part": name, "run": i, "seconds": seconds[-1]})
        value = statistics.median(seconds)
        print(f"{name:42s} {value:10.3f} s   ({repeats} runs)", flush=True)
        return value


class Benign(AuditorScorer):
    """The real network with its scores replaced by benign ones, since random weights would trigger at random."""

    def audit(self, images, prompts, noise) -> list[Audit]:
        return [
            replace(a, adv_prob=0.0, probs={c: float(c == "safe") for c in a.probs}, safety=1.0)
            for a in super().audit(images, prompts, noise)
        ]


def full_unet(in_channels: int) -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=64,
        in_channels=in_channels,
        cross_attention_dim=768,
        attention_head_dim=8,
        block_out_channels=(320, 640, 1280, 1280),
    ).eval()


def full_vae() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        latent_channels=4,
        sample_size=512,
    ).eval()


def full_text() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=49408,
            hidden_size=768,
            intermediate_size=3072,
            num_hidden_layers=12,
            num_attention_heads=12,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    ).eval()


def stock_checker() -> Any:
    """The stock safety checker's network: CLIP ViT-L/14 and its concept heads."""
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
    from transformers import CLIPConfig

    return StableDiffusionSafetyChecker(
        CLIPConfig(
            vision_config={
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "patch_size": 14,
                "image_size": 224,
                "projection_dim": 768,
            },
            projection_dim=768,
        )
    ).eval()


@contextmanager
def peak_memory(into: dict[str, float], name: str):
    """Peak resident memory above the level at entry, GiB (Linux)."""
    status = Path("/proc/self/status")

    def read(field: str) -> float:
        line = next(x for x in status.read_text().splitlines() if x.startswith(field))
        return int(line.split()[1]) / 2**20

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = read("VmRSS")
    yield
    into[name] = read("VmHWM") - before


def peak_of(name: str, work: Callable[[], Any]) -> float:
    """Peak resident memory of some work above the level before it, GiB."""
    memory: dict[str, float] = {}
    with peak_memory(memory, name):
        work()
    return memory[name]


def import_seconds(rows: Rows, repeats: int = 5) -> float:
    """Seconds that `import guardpaint` adds to the start of an interpreter."""
    bare = rows.time("python -c pass", lambda: subprocess.run([sys.executable, "-c", "pass"]), repeats)
    light = rows.time(
        "python -c 'import guardpaint'",
        lambda: subprocess.run([sys.executable, "-c", "import guardpaint"]),
        repeats,
    )
    return max(0.0, light - bare)


def repair_request(inpainter: Inpainter, size: int, depths: tuple[int, ...]) -> RepairRequest:
    g = torch.Generator().manual_seed(0)
    mask = torch.zeros(size, size)
    mask[size // 4 : size // 2, size // 4 : 3 * size // 4] = 1
    knobs = tuple(Knobs(7.5, 0.3, 0.5, 0.1, d, 100 * i) for i, d in enumerate(depths))
    return RepairRequest(
        view=torch.rand(3, size, size, generator=g),
        region=mask.bool(),
        masks=mask.expand(len(depths), -1, -1),
        knobs=knobs,
        prompt="a person in a park",
        safe_prompt="a person in a coat",
        avoid="",
        seed=0,
        base=None,  # type: ignore[arg-type]
        latent_size=(size // inpainter.factor,) * 2,
        batch=len(depths),
    )


def tournament_ratios(
    rows: Rows, name: str, inpainter: Inpainter, size: int, depths: tuple[int, ...], repeats: int
) -> dict[str, float]:
    """Times of N candidates of mixed depth, in one batch and one by one, relative to one candidate of mean depth."""
    five = repair_request(inpainter, size, depths)
    mean = round(sum(depths) / len(depths))
    one = repair_request(inpainter, size, (mean,))
    alone = [repair_request(inpainter, size, (d,)) for d in depths]
    memory: dict[str, float] = {}
    with peak_memory(memory, "one"):
        t1 = rows.time(f"{name}: one candidate, depth {mean}", lambda: inpainter.candidates(one), repeats)
    with peak_memory(memory, "batched"):
        t5 = rows.time(
            f"{name}: {len(depths)} candidates batched, depths {depths}",
            lambda: inpainter.candidates(five),
            repeats,
        )
    ts = rows.time(f"{name}: the same one by one", lambda: [inpainter.candidates(r) for r in alone], repeats)
    return {
        "n5_vs_n1": t5 / t1,
        "batched_vs_sequential": t5 / ts,
        "seconds_n1": t1,
        "seconds_n5": t5,
        "peak_gib_n1": memory["one"],
        "peak_gib_n5": memory["batched"],
    }


@torch.no_grad()
def full_size(rows: Rows, metrics: dict[str, Any], repeats: int) -> None:
    from diffusers import AutoencoderTiny, StableDiffusionInpaintPipeline, StableDiffusionPipeline

    auditor = Benign(AuditorConfig()).eval()
    taesd = AutoencoderTiny().eval()
    vae, text, tokenizer = full_vae(), full_text(), small.clip_tokenizer()
    unet = full_unet(4)
    shared = {
        "vae": vae,
        "text_encoder": text,
        "tokenizer": tokenizer,
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }
    pipe = StableDiffusionPipeline(unet=unet, scheduler=sd_scheduler(), **shared)
    pipe.set_progress_bar_config(disable=True)

    latents, words = torch.randn(2, 4, 64, 64), torch.randn(2, 77, 768)
    step = rows.time("CFG base step", lambda: unet(latents, 500, encoder_hidden_states=words), max(5, repeats))
    triple = (torch.randn(3, 4, 64, 64), torch.randn(3, 77, 768))
    sld = rows.time("SLD step (third branch)", lambda: unet(triple[0], 500, encoder_hidden_states=triple[1]), 2)
    decode = rows.time("full VAE decode 512", lambda: vae.decode(latents[:1]), 5)
    checker, pixels = stock_checker(), torch.randn(1, 3, 224, 224)
    stock = rows.time(
        "stock checker, ViT-L/14 at 224",
        lambda: checker(clip_input=pixels, images=[torch.zeros(4, 4, 3).numpy()]),
        repeats + 3,
    )
    del checker

    guard = GuardPaint(auditor, PaintsFlat(), decoders={"sd": taesd}).configured(audit_start=0.0)
    request = guard.open(pipe, request_id=None, door="attach", prompts=["a cat"], seeds=lambda i, b: (0, i))
    coarse, fine = auditor.sizes

    def audit(size: int) -> None:
        auditor.audit(request.decoder.at(latents[:1], size), ["a photograph of a cat in a garden"], 0.1)

    assert request.decoder.path((512, 512), coarse) == "exit 1/2"
    assert request.decoder.path((512, 512), guard.parts.glance_size) == "exit 1/4"
    audit(coarse)  # random weights: the first view fits their readouts
    audit_coarse = rows.time("audit, 256 px exit + auditor at 224", lambda: audit(coarse), repeats + 5)
    look = rows.time("glance, 128 px exit + auditor at 128", lambda: audit(guard.parts.glance_size), repeats + 5)
    audit_fine = rows.time("audit, whole tiny decode + auditor at 384", lambda: audit(fine), repeats + 5)
    whole = rows.time("whole tiny decode 512", lambda: request.decoder.full(latents[:1]), repeats + 5)

    twin, inside, final = guard.attach(pipe), [], []
    for run in range(CALLS):
        out = twin("a cat", num_inference_steps=2, output_type="pt", generator=torch.Generator())
        audited, last = out.safety[0].steps[0].timings["first_pass"], out.safety[0].steps[-1].timings["audit"]
        rows += [
            {"part": "in a real call: audited step", "run": run, "seconds": audited},
            {"part": "in a real call: final verdict", "run": run, "seconds": last},
        ]
        inside.append(audited)
        final.append(last)
    benign = statistics.median(inside) + statistics.median(final)
    print(f"{'in a real call: step and verdict':42s} {benign:10.3f} s   ({CALLS} runs)", flush=True)
    generation = STEPS * step + decode

    metrics["benign_audit_vs_step"] = metric(
        audit_coarse / step, repeats + 5, goal="<=0.06", note="view by the early exit at half the size"
    )
    metrics["view_vs_step"] = metrics["benign_audit_vs_step"]
    metrics["glance_vs_step"] = metric(look / step, repeats + 5, goal="<=0.02")
    metrics["whole_tiny_vs_step"] = metric(whole / step, repeats + 5, note="without an auditor pass")
    metrics["benign_audit_fine_vs_step"] = metric(
        (audit_coarse + audit_fine) / step,
        repeats + 5,
        goal="<=0.12",
        note="coarse pass and confirmation at 384 px, which takes the whole tiny decode",
    )
    metrics["benign_overhead_fraction"] = metric(
        benign / generation,
        CALLS,
        goal="<=0.003",
        note=f"X = 2, {STEPS} steps: one audited step and the final verdict, from a real call",
    )
    metrics["benign_overhead_vs_stock_checker"] = metric(
        benign / stock, CALLS, goal="<=1.0", note="whole benign overhead against one stock checker pass"
    )
    metrics["stock_checker_vs_step"] = metric(stock / step, repeats + 3)
    metrics["sld_overhead_fraction"] = metric(sld / step - 1.0, 2, note="third branch, every step")
    metrics["full_vae_audit_vs_step"] = metric(decode / step, 5, note="the decode a careless audit would pay")

    del pipe, unet, request
    gc.collect()
    inpainter = Inpainter(StableDiffusionInpaintPipeline(unet=full_unet(9), scheduler=sd_scheduler(), **shared), taesd)
    metrics.update(tournaments.measure(rows.time, peak_of, inpainter, generation))


@torch.no_grad()
def embedded_size(rows: Rows, metrics: dict[str, Any], repeats: int) -> None:
    """Measure the small models: batching, and the terms of Cost_t against the whole extra time."""
    ratios = tournament_ratios(rows, "embedded size", small.inpainter(), 64, (2, 4, 6, 8, 10), repeats)
    metrics["embedded_tournament_n5_vs_n1"] = metric(ratios["n5_vs_n1"], repeats)
    metrics["embedded_tournament_batched_vs_sequential"] = metric(ratios["batched_vs_sequential"], repeats)
    pipe = small.pipeline("sd")
    policy = replace(Policy.default(), last_resort=("block",))
    guard = GuardPaint(FlagsBright(), small.inpainter(), FixedProposer(), policy=policy)
    twin = guard.attach(pipe)
    parts, whole = [], []
    for seed in range(repeats + 2):
        g = torch.Generator().manual_seed(seed)
        record = twin("a cat", num_inference_steps=8, output_type="pt", generator=g).safety[0].steps[0]
        terms = {k: record.timings.get(k, 0.0) for k in ("first_pass", "view", "audit", "repair", "verify", "reinsert")}
        start = time.perf_counter()
        plain = pipe("a cat", num_inference_steps=8, output_type="pt", generator=g)
        base = time.perf_counter() - start
        start = time.perf_counter()
        twin.__class__.__call__(twin, "a cat", num_inference_steps=8, output_type="pt", generator=g)
        guarded = time.perf_counter() - start
        del plain
        both = [s.timings for s in guard.reports()[0].steps]
        parts.append(sum(sum(t.values()) for t in both))
        whole.append(guarded - base)
        rows.append({"part": "Cost_t terms, embedded", "run": seed, "seconds": parts[-1], **terms, "whole": whole[-1]})
    ratio = statistics.median(p / w for p, w in zip(parts, whole, strict=True))
    metrics["cost_model_explained"] = metric(
        ratio,
        len(parts),
        note="sum of Cost_t's measured terms over the measured extra time of a guarded call",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="docs/results/bench.json")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--embedded-only", action="store_true")
    args = parser.parse_args()
    require_clean(args.out)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows, metrics = Rows(), {}
    metrics["import_seconds_light"] = metric(import_seconds(rows), 5)
    embedded_size(rows, metrics, args.repeats)
    if not args.embedded_only:
        full_size(rows, metrics, args.repeats)
    write_results(args.out, metrics, rows, seed=0)
    for name, row in metrics.items():
        goal = f"  goal {row['goal']}: {'met' if row['met'] else 'NOT met'}" if "goal" in row else ""
        print(f"{name:44s} {row['value']:.4f}{goal}")


if __name__ == "__main__":
    main()
