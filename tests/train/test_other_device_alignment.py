"""Alignment on another device: SFT, KTO and BCO from pairs to a merged pipeline, watched and plotted."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from elsewhere import rarely
from helpers import small_inpainter
from pictures import small_pairs

from guardpaint.data.pairs import PairStore
from guardpaint.draft.loading import load_pipeline
from guardpaint.policy import Policy
from guardpaint.testing.other_device import OTHER, other_device
from guardpaint.train import align
from guardpaint.train.engine import Run
from guardpaint.train.pair_latents import encode_pairs, load_pairs

POLICY = Policy.default()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A small random inpainting pipeline, pairs, and their latents."""
    root = tmp_path_factory.mktemp("align")
    small_inpainter(root / "inpainter")
    for split, count in (("train", 4), ("validation", 2)):
        small_pairs(root / "pairs", split, {"safe": 4, "nudity": count, "violence": count})
    pipe = load_pipeline(root / "inpainter")
    for split in ("train", "validation"):
        encode_pairs(PairStore(root / "pairs"), split, pipe, POLICY)
    return root


def test_stage_latents(home, tmp_path):
    """Pairs are encoded where the inpainter is, and load into the same numbers as on the CPU."""
    small_pairs(tmp_path, "train", {"safe": 1, "nudity": 1, "violence": 1})
    pipe = load_pipeline(home / "inpainter")
    encode_pairs(PairStore(tmp_path), "train", pipe, POLICY)
    here = load_pairs(tmp_path, "train", pipe.vae)
    with other_device():
        pipe = pipe.to(OTHER)
        encode_pairs(PairStore(tmp_path), "train", pipe, POLICY)
        there = load_pairs(tmp_path, "train", pipe.vae)
    for name, value in vars(here).items():
        other = getattr(there, name)
        assert other.device.type == "cpu" and torch.allclose(value, other, atol=1e-3), name


def run(home, out, method, minutes=None, **options):
    model = {"method": method, "rank": 4, "unroll_every": 1, **options}
    train = {"steps": 2, "batch_size": 4, "learning_rate": 0.01, "warmup": 1, "seed": 1, "validate_every": 2}
    out.mkdir(parents=True, exist_ok=True)
    (out / "c.yaml").write_text(json.dumps({"model": model, "train": train}))
    align.run(Run(out / "c.yaml", out, minutes, quiet=True), method, str(home / "inpainter"), home / "pairs")
    return out


@pytest.mark.parametrize("method", ["sft", "bco", *rarely("kto", "bco-refreshed")])
def test_stage_alignment(home, tmp_path, method):
    """A run stops, resumes, is watched, merged and plotted; in the slow ones, the CPU measures the same."""
    compared = method in ("kto", "bco-refreshed")
    options = {"reference": "refresh", "refresh_every": 1} if method.endswith("refreshed") else {}
    method = method.partition("-")[0]
    with other_device():
        for minutes in (0.0, None):
            out = run(home, tmp_path / "there", method, minutes, **options)
    for name in ("dynamics.png", "activations.png", "watch.csv", "lora/adapter_model.safetensors"):
        assert (out / name).stat().st_size > 0
    after = load_pipeline(out / "model").unet.state_dict()
    assert {v.device.type for v in after.values()} == {"cpu"}
    if not compared:
        return
    here = run(home, tmp_path / "here", method, **options)
    measured = [list(csv.DictReader((place / "watch.csv").open())) for place in (here, out)]
    for one, two in zip(*measured, strict=True):
        assert float(one["error"]) == pytest.approx(float(two["error"]), rel=1e-3)
        assert float(one["h_unsafe"]) == pytest.approx(float(two["h_unsafe"]), abs=1e-2)
