"""Small detectors that find one thing, a bright square, and every kind of auditor for the tests of what they share."""

from __future__ import annotations

import torch
from torch import nn

from guardpaint.audit.classifier import ClassifierAuditor, ClassifierSettings
from guardpaint.audit.ensemble import Ensemble
from guardpaint.audit.inputs import prepared
from guardpaint.audit.open_nsfw import OnnxAuditor
from guardpaint.audit.segmenter import Segmenter
from guardpaint.audit.zero_shot import ZeroShotAuditor, ZeroShotSettings, prompts_of
from guardpaint.policy import Policy
from guardpaint.testing import small, small_detectors

LABELS = {"normal": "safe", "nsfw": "nudity", "gore": "violence"}
CELLS = 4


def square(row=None, column=None):
    """A dark picture with a bright square in one of 4 × 4 places; without a place, a dark picture."""
    image = torch.full((3, 32, 32), 0.1)
    if row is not None:
        image[:, row * 8 : row * 8 + 8, column * 8 : column * 8 + 8] = 0.95
    return image


PLACES = [(r, c) for r in range(CELLS) for c in range(CELLS)]


def place(heat):
    """Where a map of 4 × 4 cells peaks."""
    assert heat.shape == (CELLS, CELLS)
    return divmod(int(heat.argmax()), CELLS)


def classifier(family, **settings):
    model, processor = small_detectors.classifier(family)
    return ClassifierAuditor(model, processor, ClassifierSettings(LABELS, **settings))


@torch.no_grad()
def finds_squares(family, maps):
    """A classifier whose head answers `nsfw` for a bright square anywhere."""
    model, processor = small_detectors.classifier(family)
    if family == "resnet":
        let_through(model)
    head = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    seen = []
    hook = head.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    model(prepared(torch.stack([*(square(*p) for p in PLACES), square()]), processor))
    hook.remove()
    bright, dark = seen[0][:-1].mean(0), seen[0][-1]
    direction = (bright - dark) / (bright - dark).norm() ** 2
    head.weight.zero_()
    head.bias.zero_()
    head.weight[1] = 8 * direction
    head.bias[1] = -4 * direction @ (bright + dark)
    return ClassifierAuditor(model, processor, ClassifierSettings(LABELS, maps=maps))


def let_through(model):
    """Convolutions that hand on the brightness of a place, so that features stay where their cause is."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            middle = module.kernel_size[0] // 2
            module.weight.zero_()
            module.weight[:, :, middle, middle] = 1 / module.in_channels


def zero_shot(family, segmenter=False, **settings):
    model, processor = small_detectors.ENCODERS[family]()
    seen = Segmenter(*small_detectors.clipseg()) if segmenter else None
    return ZeroShotAuditor(model, processor, ZeroShotSettings(prompts_of(Policy.default()), **settings), seen)


EVERY = {
    **{f"classifier {f}": (lambda f=f: classifier(f)) for f in small_detectors.CLASSIFIERS},
    "classifier windows": lambda: classifier("resnet", maps="windows"),
    "classifier no maps": lambda: classifier("vit", maps="none"),
    **{f"zero-shot {f}": (lambda f=f: zero_shot(f)) for f in small_detectors.ENCODERS},
    "zero-shot clipseg": lambda: zero_shot("clip", segmenter=True),
    "open_nsfw": OnnxAuditor,
    "auditor-scorer": small.auditor,
    "ensemble": lambda: Ensemble([classifier("resnet"), zero_shot("clip"), small.auditor()]),
}
"""A small instance of every kind of auditor, by a name for the test."""
