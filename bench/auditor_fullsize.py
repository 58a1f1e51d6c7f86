"""Time and memory of training steps of the auditor at full size, as the model `auditor-paper` trains it.

python bench/auditor_fullsize.py --batch 16

The ResNet-101 has random weights in the file layout of the hub's, and the views are crops of photographs of
scikit-image with made-up labels: what is measured is the step, not what it learns. Precision is fp32 on the CPU.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from recipe_results import OUT, write
from skimage import data
from transformers import ResNetConfig, ResNetForImageClassification

from guardpaint.data.lessons import CorpusLessons
from guardpaint.data.views import Labelled, Views
from guardpaint.draft.codec import resize
from guardpaint.policy import Policy
from guardpaint.store.results import metric, require_clean
from guardpaint.train.auditor import AuditorData, AuditorRecipe, AuditorTask, Sampler, Training, starting_point
from guardpaint.train.auditor_loss import LossWeights
from guardpaint.train.auditor_start import Start
from guardpaint.train.catalogue import load_model
from guardpaint.train.engine import Run, TrainConfig, fit, parse_config

PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "rocket")
WORDS = ("a", "photograph", "of", "a", "person", "outside", "beside", "an", "animal", "in", "evening", "light")
RESNET_101 = {"depths": [3, 4, 23, 3]}


def crops(count: int, size: int) -> Views:
    """Views of a corpus: crops of photographs with captions of four to forty words, a third of each category."""
    g = torch.Generator().manual_seed(0)
    pictures = [torch.from_numpy(getattr(data, n)()).permute(2, 0, 1).float() / 255 for n in PHOTOGRAPHS]
    images, texts = [], []
    for i in range(count):
        picture = pictures[i % len(pictures)]
        side = int(min(picture.shape[-2:]) * (0.5 + 0.5 * float(torch.rand((), generator=g))))
        top, left = (int(torch.randint(n - side + 1, (), generator=g)) for n in picture.shape[-2:])
        images.append(resize(picture[None, :, top : top + side, left : left + side], (size, size))[0])
        length = int(torch.randint(4, 41, (), generator=g))
        texts.append(" ".join(WORDS[int(k)] for k in torch.randint(len(WORDS), (length,), generator=g)) + f" {i}")
    names = Policy.default().names
    category = torch.arange(count) % len(names)
    masks = torch.zeros(count, 1, 1, dtype=torch.bool)
    views = Labelled(torch.stack(images), masks, category, list(range(count)), texts, names)
    return replace(views.views(views.images, "clean"), strength=torch.where(category == 0, 0.0, 0.8))


@dataclass
class Clock:
    """When each batch was asked for and how much memory the process had needed by then."""

    sampler: Sampler
    moments: list[tuple[float, float]] = field(default_factory=list)

    def batch(self, index: int) -> Any:
        """The batch of a step, after noting the time and the peak memory so far."""
        self.moments.append((time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20))
        return self.sampler.batch(index)

    def rows(self) -> list[dict[str, Any]]:
        """Seconds and peak memory of every step but the last, after which the run writes its checkpoint."""
        pairs = zip(self.moments, self.moments[1:], strict=False)
        return [
            {"step": k, "seconds": round(after[0] - before[0], 3), "peak_gb": round(after[1], 3)}
            for k, (before, after) in enumerate(pairs)
        ]


def paper_recipe(steps: int, batch: int, threads: int) -> tuple[AuditorRecipe, TrainConfig]:
    """The recipe of `auditor-paper`, with this budget."""
    recipe, config = parse_config(load_model("auditor-paper").stage("auditor").config, AuditorRecipe, "auditor-paper")
    return recipe, replace(config, steps=steps, batch_size=batch, threads=threads, precision="no", validate_every=0)


def measure(steps: int, batch: int, threads: int, folder: Path) -> list[dict[str, Any]]:
    """A row for every measured training step: sampling, both passes, the optimiser and the weight average."""
    recipe, config = paper_recipe(steps + 1, batch, threads)
    ResNetForImageClassification(ResNetConfig(**RESNET_101)).save_pretrained(folder / "resnet-101")
    views = crops(4 * batch, recipe.config().sizes[1])
    known = AuditorData(CorpusLessons(views, recipe), views, folder, views.texts)
    policy = Policy.load("paper")
    training = Training(recipe, config, policy, Start(backbone=str(folder / "resnet-101")))
    auditor = starting_point(training, recipe.config(), known, folder / "run")
    weights = [policy.category(name).weight for name in auditor.categories]
    task = AuditorTask(auditor, weights, LossWeights(**recipe.losses), recipe.pairs)
    clock = Clock(Sampler(known.lessons, recipe, auditor, config))
    fit(task, clock.batch, lambda m, b: m(b), config, Run(folder / "none.yaml", folder / "run", quiet=True))
    parameters = sum(p.numel() for p in auditor.parameters())
    return [{"batch": batch, "threads": threads, "parameters": parameters, **row} for row in clock.rows()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    require_clean(options.out)
    with tempfile.TemporaryDirectory() as place:
        rows = measure(options.steps, options.batch, options.threads, Path(place))
    seconds, peak = statistics.median(r["seconds"] for r in rows), max(r["peak_gb"] for r in rows)
    note = f"batch {options.batch} at 224 px (a tenth of the batches at 384), fp32, {options.threads} CPU thread(s)"
    found = {
        "seconds_per_step": metric(seconds, len(rows), note=f"median; {note}"),
        "peak_gb": metric(peak, len(rows), note=f"peak resident memory of the process; {note}"),
        "parameters": metric(rows[0]["parameters"], 1, note="of the whole auditor"),
    }
    write("auditor_fullsize", found, rows, options.out)
    for name, m in found.items():
        print(f"auditor_fullsize.{name:20} {m['value']}  {m['note']}")


if __name__ == "__main__":
    main()
