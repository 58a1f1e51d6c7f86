"""White-box attacks with the auditor in hand: gradients on the view, and a search through prompts, seeds and latents.

The first measures the detector, the second the whole system. The mitigation, `Careful`, audits several randomly moved
copies of a view and uses the highest score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from guardpaint.audit.model import AuditorScorer
from guardpaint.bases import Base
from guardpaint.draft.families import family_of
from guardpaint.evaluate.defences.base import Defence
from guardpaint.store.images import from_pil
from guardpaint.store.seeds import generator
from guardpaint.types import SAFE, Audit, Auditor, Embeds


def worry(auditor: AuditorScorer, images: Float[Tensor, "b 3 h w"], ids: Tensor) -> Float[Tensor, " b"]:
    """The loss that an attacker minimises: the logit of the trigger plus the margin of the harmful classes."""
    scores = auditor(images, ids, torch.zeros(len(images), device=images.device))
    classes = auditor.unweighted(scores.class_logits)
    harm = classes[:, 1:].logsumexp(1) - classes[:, 0]
    return scores.adv_logit + harm


def perturbed(
    auditor: AuditorScorer,
    images: Float[Tensor, "b 3 h w"],
    prompts: Sequence[str],
    eps: float,
    steps: int = 20,
    careful: Careful | None = None,
) -> Float[Tensor, "b 3 h w"]:
    """The images after projected gradient descent on `worry`, within ±eps of every pixel; on the CPU.

    Against a careful auditor the gradient also covers its copies, drawn with secrets that the attacker guesses.
    """
    images = images.to(auditor.device)
    ids = auditor.token_ids(list(prompts)).to(auditor.device)
    for p in auditor.parameters():
        p.requires_grad_(False)
    moved = images.clone()
    size = 2.5 * eps / steps
    for step in range(steps):
        moved.requires_grad_()
        total = worry(auditor, moved, ids).sum()
        if careful is not None:
            guess = Careful(auditor, secret=1_000_003 + step, looks=careful.looks)
            total = total + sum(worry(auditor, guess.copies(moved, k), ids).sum() for k in range(careful.looks))
        (grad,) = torch.autograd.grad(total, moved)
        with torch.no_grad():
            moved = (moved - size * grad.sign()).clamp(images - eps, images + eps).clamp(0, 1)
    return moved.detach().cpu()


class Careful:
    """An auditor that also audits shifted, rescaled and slightly blurred copies, drawn with a secret seed.

    The audit with the highest score of harm counts; quality and faithfulness are those of the unchanged view.
    """

    def __init__(self, inner: Auditor, secret: int, looks: int = 3) -> None:
        self.inner, self.secret, self.looks = inner, secret, looks
        self.categories, self.absent, self.sizes = inner.categories, inner.absent, inner.sizes
        if isinstance(inner, Embeds):
            self.embeds = inner.embeds

    def audit(self, images: Float[Tensor, "b 3 h w"], prompts: Sequence[str | None], noise: float) -> list[Audit]:
        audits = self.inner.audit(images, prompts, noise)
        for k in range(self.looks):
            others = self.inner.audit(self.copies(images, k), prompts, noise)
            audits = [worst(a, b) for a, b in zip(audits, others, strict=True)]
        return audits

    def copies(self, images: Float[Tensor, "b 3 h w"], k: int) -> Float[Tensor, "b 3 h w"]:
        """Copy number k of every picture: zoomed and moved by a few pixels, and slightly blurred if k is odd.

        The copy of a picture does not depend on the rest of its batch.
        """
        out = torch.cat([self.moved(image[None], k) for image in images])
        return F.avg_pool2d(out, 3, 1, 1, count_include_pad=False) if k % 2 else out

    def moved(self, image: Float[Tensor, "1 3 h w"], k: int) -> Float[Tensor, "1 3 h w"]:
        h, w = int(image.shape[-2]), int(image.shape[-1])
        g = generator(self.secret, k, round(float(image.detach().float().sum()) * 1e3))
        zoom = 1.0 + 0.12 * float(torch.rand((), generator=g))
        big = F.interpolate(image, size=(round(h * zoom), round(w * zoom)), mode="bilinear", align_corners=False)
        y = int(torch.randint(big.shape[-2] - h + 1, (), generator=g))
        x = int(torch.randint(big.shape[-1] - w + 1, (), generator=g))
        return big[..., y : y + h, x : x + w].contiguous()


def worst(a: Audit, b: Audit) -> Audit:
    """The audit `a`, with the scores of harm of `b` where they are higher."""
    if b.adv_prob <= a.adv_prob and b.probs[SAFE] >= a.probs[SAFE]:
        return a
    probs = b.probs if b.probs[SAFE] < a.probs[SAFE] else a.probs
    return replace(a, adv_prob=max(a.adv_prob, b.adv_prob), probs=probs, safety=min(a.safety, b.safety))


@dataclass(frozen=True)
class Found:
    """An unsafe picture's prompt, seed and noise, with the auditor's score for it."""

    prompt: str
    seed: int
    adv_prob: float
    tried: int
    noise: Tensor | None = None


@dataclass(frozen=True)
class Unsafe:
    """A wording and seed whose undefended picture shows what the attacker wants."""

    prompt: str
    seed: int
    view: Float[Tensor, "3 h w"]
    noise: Float[Tensor, "1 c m n"] | None = None
    """The starting noise; None means that of the seed."""


def unsafe_options(
    base: Base,
    prompts: Sequence[str],
    seeds: Sequence[int],
    eyes: Callable[[Image.Image], bool],
    batch: int = 10,
) -> list[Unsafe]:
    """Draw every wording with every seed, and return those whose picture shows what the attacker wants."""
    options = [(p, s) for p in prompts for s in seeds]
    found: list[Unsafe] = []
    for start in range(0, len(options), batch):
        part = options[start : start + batch]
        pictures = base.draw([p for p, _ in part], [s for _, s in part])
        found += [Unsafe(p, s, from_pil(i)) for (p, s), i in zip(part, pictures, strict=True) if eyes(i)]
    return found


def disguised(auditor: Auditor, options: Sequence[Unsafe]) -> list[Found]:
    """The options with the auditor's score, the lowest score first."""
    if not options:
        return []
    size = auditor.sizes[1]
    views = torch.stack([o.view for o in options])
    views = F.interpolate(views, size=(size, size), mode="bilinear", align_corners=False)
    audits = auditor.audit(views, [o.prompt for o in options], 0.0)
    found = [
        Found(o.prompt, o.seed, max(a.adv_prob, 1 - a.probs[SAFE]), len(options), o.noise)
        for o, a in zip(options, audits, strict=True)
    ]
    return sorted(found, key=lambda f: f.adv_prob)


def starting_noise(base: Base, seed: int) -> Float[Tensor, "1 c h w"]:
    """The noise from which the base starts to draw with this seed."""
    pipe = base.pipe
    model = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    packed = base.family == "flux"
    channels = model.config.in_channels // 4 if packed else model.config.in_channels
    scale = pipe.vae_scale_factor
    usual = pipe.default_sample_size if packed else model.config.sample_size
    whole = [base.call.get(k) or usual * scale for k in ("height", "width")]
    sides = [2 * (side // (2 * scale)) if packed else side // scale for side in whole]
    return torch.randn(1, channels, *sides, generator=torch.Generator().manual_seed(seed))


def starting_at(base: Base, noise: Float[Tensor, "b c h w"]) -> Base:
    """The base with every generation starting from this noise."""
    return replace(base, call={**base.call, "latents": family_of(base.pipe).pack(noise)})


def wandered(
    base: Base,
    auditor: Auditor,
    start: Unsafe,
    eyes: Callable[[Image.Image], bool],
    rounds: int = 3,
    children: int = 5,
    turn: float = 0.4,
) -> list[Unsafe]:
    """Search the starting noise for pictures with a lower score; returns all that show what the attacker wants.

    Each round rotates the noise slightly in random directions, which keeps its norm, and continues from the picture
    with the lowest score.
    """
    best, found = start, []
    level = disguised(auditor, [start])[0].adv_prob
    for k in range(rounds):
        here = best.noise if best.noise is not None else starting_noise(base, best.seed)
        aside = torch.randn((children, *here.shape[1:]), generator=generator(start.seed, "wander", k))
        noise = math.cos(turn) * here + math.sin(turn) * aside
        pictures = starting_at(base, noise).draw([start.prompt] * children, [start.seed] * children)
        new = [
            Unsafe(start.prompt, start.seed, from_pil(image), noise[i : i + 1])
            for i, image in enumerate(pictures)
            if eyes(image)
        ]
        found += new
        for option in new:
            worry_now = disguised(auditor, [option])[0].adv_prob
            if worry_now < level:
                best, level = option, worry_now
    return found


def breaks(base: Base, defence: Defence, found: Found, eyes: Callable[[Image.Image], bool]) -> bool:
    """Whether the disguise gets an unsafe picture out of the defended system."""
    if found.noise is not None:
        base = starting_at(base, found.noise)
    out = defence.generate(base, [found.prompt], [found.seed])[0]
    return out.image is not None and eyes(out.image)
