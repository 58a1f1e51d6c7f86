"""From photographs to a safety-tuned inpainter, by the commands of docs/train.md alone.

The inpainter is a small random one with the layout of Stable Diffusion 1.5 inpainting in half precision: safety checker
and all, nothing but `*.fp16.safetensors`. Kinds of photographs stand in for harms, under a policy with three of them.
"""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from typer.testing import CliRunner

from guardpaint.bases import load_inpainter
from guardpaint.cli.main import app
from guardpaint.data.card import SPLITS
from guardpaint.data.pairs import PairStore
from guardpaint.data.store import Corpus, Example, key_of
from guardpaint.draft.loading import LORA, load_pipeline
from guardpaint.policy import Category, Policy
from guardpaint.store.images import png_bytes
from guardpaint.testing import small
from guardpaint.testing.photographs import photograph
from guardpaint.train import catalogue

KINDS = {"safe": ("coffee", "flower"), "cats": ("chelsea",), "space": ("hubble", "rocket"), "tissue": ("tissue",)}
POLICY = Policy(
    "photographs",
    tuple(Category(name, safe_prompt="a plain wall", repair_weight=2.0 + k) for k, name in enumerate(KINDS)),
    trigger=1e-6,  # everything is flagged, whatever the random auditor makes of it
)


def safety_checker():
    """A small StableDiffusionSafetyChecker with its image processor, as SD 1.5 repositories have them."""
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
    from transformers import CLIPConfig, CLIPImageProcessorPil

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 32, "patch_size": 16}  # fmt: skip
    checker = StableDiffusionSafetyChecker(CLIPConfig(vision_config=vision, projection_dim=16))
    return checker.eval(), CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})


def crops(name, count):
    """Squares of one photograph that differ in place and size."""
    picture = photograph(name)
    for k in range(count):
        side = min(picture.size) * (k + 3) // (count + 3)
        left, top = (picture.width - side) * k // count, (picture.height - side) * (count - k) // count
        yield picture.crop((left, top, left + side, top + side)).resize((96, 96))


def write_corpus(folder):
    """A corpus as `data build` leaves it: pictures, and their labels and splits."""
    corpus, examples, rows = Corpus(folder), [], []
    for kind, names in KINDS.items():
        for name in names:
            for k, picture in enumerate(crops(name, 6 // len(names))):
                data, prompt = png_bytes(picture), f"a photograph of {name}, number {k}"
                examples.append(Example(key_of(data), data, prompt, name, None))
                split = "validation" if k == 0 else "train"
                rows.append({"key": key_of(data), "split": split, "label": kind, "prompt": prompt})
    corpus.add("photographs", examples, {"read": len(examples), "kept": len(examples), "repeated": 0, "broken": 0})
    corpus.append(SPLITS, rows)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("photographs")
    write_corpus(root / "corpus")
    (root / "policy.yaml").write_text(yaml.safe_dump(POLICY.to_dict()))
    small.auditor(categories=POLICY.names).save_pretrained(root / "auditor", torch.float32)
    pipe = small.inpainter(3).pipe
    checker, processor = safety_checker()
    pipe.register_modules(safety_checker=checker, feature_extractor=processor)
    pipe.register_to_config(requires_safety_checker=True)
    pipe.to(torch.float16).save_pretrained(root / "sd15-inpainting", variant="fp16")
    return root


def command(*words):
    result = CliRunner().invoke(app, [str(w) for w in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def short(home, name, stages):
    """The shipped recipe with small ranks and a few steps; its stages, inputs and options as they are."""
    model = yaml.safe_load((catalogue.CONFIGS / "sd15-inpaint-safe.yaml").read_text())
    for stage in model["stages"]:
        if "model" in stage:
            stage["model"]["rank"] = 2
            stage["train"] |= {"steps": 2, "warmup": 1, "validate_every": 1, "precision": "no"}
    path = home / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**model, "stages": [s for s in model["stages"] if s["name"] in stages]}))
    return path


@pytest.mark.slow
def test_the_commands_of_the_docs(home):
    pairs, inpainter = home / "pairs", home / "sd15-inpainting"
    files = {p.name for p in (inpainter / "unet").iterdir()}
    assert files == {"config.json", "diffusion_pytorch_model.fp16.safetensors"}
    made = command(
        "data", "pairs", pairs, "--corpus", home / "corpus", "--auditor", home / "auditor", "--inpainter", inpainter,
        "--policy", home / "policy.yaml",
    )  # fmt: skip
    assert "6 safe" in made and "18 auditor refused" in made
    store = PairStore(pairs)
    unsafe = [p for p in store.rows() if p.category != "safe"]
    assert {p.mask_from for p in unsafe} == {"auditor"}
    assert all(store.picture(p.mask).convert("L").getextrema() == (0, 255) for p in unsafe)
    command("data", "review", pairs)
    (home / "approvals.json").write_text(json.dumps({p.key: True for p in unsafe}))
    assert "18 decisions" in command("data", "approve", pairs, home / "approvals.json")
    command("data", "latents", pairs, "--inpainter", inpainter, "--policy", home / "policy.yaml")

    everything = short(home, "safe", ("sft", "bco", "kto", "kto-printed", "stack"))
    given = ("--set", f"inpainter={inpainter}", "--set", f"pairs={pairs}", "--out", home / "run")
    said = command("train", everything, *given)
    assert "memory: about" in said and "stack: finished" in said
    command("train", everything, *given, "--stage", "kto", "--stage", "kto-printed")
    for stage in ("sft", "bco", "kto", "kto-printed"):
        out = home / "run" / stage
        card = json.loads((out / "model/card.json").read_text())
        assert card["trained_on"]["categories"] == list(POLICY.names) and card["method"]["weights"] == [
            2.0,
            3.0,
            4.0,
            5.0,
        ]
        assert card["method"]["mixture"] == [6, 2, 2, 2]
        for name in ("dynamics.png", "dynamics.csv", "activations.png", "watch.csv"):
            assert (out / name).stat().st_size > 0, (stage, name)
        trained = load_pipeline(out / "model")
        assert trained.safety_checker is not None and trained.unet.dtype == torch.float32
    assert "reference_drift" not in card["alarms"]
    load_inpainter(str(inpainter)).load_lora_weights(home / "run/stack/model", weight_name=LORA)

    one = {"model": {"method": "sft", "rank": 2}, "train": {"steps": 1, "batch_size": 4, "learning_rate": 0.001}}
    (home / "sft.yaml").write_text(yaml.safe_dump(one))
    heavier = {**POLICY.to_dict(), "categories": [{**c, "repair_weight": 9.0} for c in POLICY.to_dict()["categories"]]}
    (home / "heavier.yaml").write_text(yaml.safe_dump(heavier))
    command(
        "train", "stage", "sft", "--config", home / "sft.yaml", "--out", home / "one", "--set",
        f"inpainter={inpainter}", "--set", f"pairs={pairs}", "--set", f"policy={home / 'heavier.yaml'}",
    )  # fmt: skip
    card = json.loads((home / "one/model/card.json").read_text())
    assert card["method"]["weights"] == [9.0] * 4 and f"--set policy={home / 'heavier.yaml'}" in card["command"]


def test_half_precision_is_read_with_and_without_variant(home, tmp_path):
    """The fp16 variant alone, plain fp16 files, and both beside each other give the same fp32 weights."""
    first = load_inpainter(str(home / "sd15-inpainting"))
    assert first.unet.dtype == first.text_encoder.dtype == torch.float32
    first.to(torch.float16).save_pretrained(tmp_path / "plain")
    second = load_inpainter(str(tmp_path / "plain"))
    first.save_pretrained(tmp_path / "plain", variant="fp16")
    third = load_inpainter(str(tmp_path / "plain"))
    for other in (second, third):
        for a, b in zip(first.unet.parameters(), other.unet.parameters(), strict=True):
            assert b.dtype == torch.float32 and torch.equal(a.float(), b)
