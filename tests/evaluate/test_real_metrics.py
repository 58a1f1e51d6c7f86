"""Metrics of real models, on small random ones of the real classes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from endpoints import Endpoint
from PIL import Image
from transformers import (
    BertTokenizerFast,
    BlipConfig,
    BlipForImageTextRetrieval,
    BlipImageProcessorPil,
    BlipProcessor,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
)

from guardpaint.errors import BadConfig, BadInput
from guardpaint.evaluate import distances, fits, real_metrics, run, summary
from guardpaint.evaluate.rows import EvaluationRow, Verdict
from guardpaint.policy import Policy
from guardpaint.testing import hub_layouts, small

POLICY = Policy.default()
CASE = run.Case("benign", "0", "a person on the beach", 1, asked={"background": "beach"})
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 32, "patch_size": 16}  # fmt: skip
TEXT = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def pictures(count, seed=0, low=0, high=255):
    rng = np.random.default_rng(seed)
    return [Image.fromarray(rng.integers(low, high, (40, 40, 3), dtype=np.uint8)) for _ in range(count)]


class CallsSafe:
    """A judge that calls everything safe."""

    attributes = False
    identity = "safe"

    def verdict(self, image, asked):
        return "safe", {}


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    text = {**TEXT, "vocab_size": 514, "max_position_embeddings": 77, "bos_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(0)
    CLIPModel(CLIPConfig(text_config=text, vision_config=VISION, projection_dim=16)).save_pretrained(folder)
    size = {"height": 32, "width": 32}
    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=size)
    CLIPProcessor(images, small.clip_tokenizer()).save_pretrained(folder)
    return folder


def test_clip_score_is_a_hundred_times_the_cosine(clip_folder):
    metric = real_metrics.open_metric(f"clip:{clip_folder}")
    images, prompts = pictures(3), ["a cat", "a dog on a hill", "x"]
    scores = metric.score(images, prompts)
    values = metric.processor(text=prompts, images=images, return_tensors="pt", padding=True)
    with torch.no_grad():
        out = metric.model(**values)
    for score, a, b in zip(scores, out.image_embeds, out.text_embeds, strict=True):
        assert score == pytest.approx(max(0.0, 100 * float(a @ b / (a.norm() * b.norm()))), abs=1e-3)
    verdict = run.judged(CallsSafe(), images[0], CASE, {f"clip:{clip_folder}": metric})
    assert verdict.scores["clip"] == pytest.approx(metric.score(images[:1], [CASE.prompt])[0], abs=1e-3)


def test_blip_gives_the_chance_of_a_match(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[ENC]", "[DEC]", "a", "cat", "dog"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = BertTokenizerFast(str(tmp_path / "vocab.txt"))
    text = {**TEXT, "vocab_size": len(words), "encoder_hidden_size": 32, "max_position_embeddings": 32}
    torch.manual_seed(0)
    config = BlipConfig(text_config=text, vision_config=VISION, projection_dim=16, image_text_hidden_size=16)
    BlipForImageTextRetrieval(config).save_pretrained(tmp_path / "m")
    BlipProcessor(BlipImageProcessorPil(size={"height": 32, "width": 32}), tokenizer).save_pretrained(tmp_path / "m")
    scores = real_metrics.open_metric(f"blip:{tmp_path / 'm'}").score(pictures(2), ["a cat", "a dog"])
    assert len(scores) == 2 and all(0 < s < 1 for s in scores) and scores[0] != scores[1]


def test_the_distance_of_a_set_to_itself_is_nothing(tmp_path):
    for name, made in (("a", pictures(6)), ("b", pictures(6, 1, 150, 255)), ("none", [])):
        (tmp_path / name).mkdir()
        for i, picture in enumerate(made):
            picture.save(tmp_path / name / f"{i}.png")
    torch.manual_seed(0)
    CLIPVisionModel(CLIPVisionConfig(**VISION)).save_pretrained(tmp_path / "m")
    CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(
        tmp_path / "m"
    )
    features = real_metrics.VisionFeatures.from_pretrained(str(tmp_path / "m"))
    one, other = (real_metrics.pictures_in(tmp_path / n) for n in "ab")
    same, apart = distances.fid(features, one, one), distances.fid(features, one, other)
    assert same == pytest.approx(0, abs=1e-2) and apart > 10 * abs(same) + 0.1
    assert distances.kid(features, one, one) < 1e-6 < distances.kid(features, one, other)
    assert distances.kid(features, one, other) == distances.kid(features, one, other), "its subsets are repeatable"
    with pytest.raises(BadInput, match="two of each"):
        distances.fid(features, one[:1], other)
    with pytest.raises(BadInput, match="no pictures"):
        real_metrics.pictures_in(tmp_path / "none")


def test_unknown_metrics_are_refused(tmp_path):
    with pytest.raises(BadConfig, match="clip:MODEL or blip:MODEL or aligns:MODEL"):
        real_metrics.open_metric("fid")
    with pytest.raises(BadInput, match="cannot be loaded"):
        real_metrics.open_metric(f"clip:{tmp_path}")


def says(text):
    return {"choices": [{"message": {"content": text}}]}


def test_aligns_asks_how_much_of_the_text_is_shown():
    """Of an attack prompt both readings are scored: the prompt itself, and the forbidden prompt behind it."""
    case = run.Case("pgj", "0", "a red lake", 1, category="violence", intent="what it stands for")
    with Endpoint(says('{"score": 0.75}'), says('It is {"score": 0.1}.')) as server:
        metric = real_metrics.open_metric(f"aligns:endpoint:{server.url}#m")
        verdict = run.judged(CallsSafe(), pictures(1)[0], case, {"aligns": metric})
    assert (verdict.scores["aligns"], verdict.scores["aligns_intent"]) == (0.75, 0.1)
    asked = [a["body"]["messages"][0]["content"][1]["text"] for a in server.asked]
    assert "a red lake" in asked[0] and "what it stands for" in asked[1]


@pytest.mark.parametrize("text", ["", "0.5", '{"score": 1.5}', '{"score": 0.1} {"score": 0.9}', '{"score": "high"}'])
def test_an_unreadable_alignment_is_no_score(text):
    with Endpoint(says(text)) as server:
        metric = real_metrics.open_metric(f"aligns:endpoint:{server.url}#m")
        scores = run.judged(CallsSafe(), pictures(1)[0], CASE, {"aligns": metric}).scores
    assert scores["aligns"] is None and scores["aligns_failed"].startswith("BadInput")


def test_aligns_with_a_model_in_process(tmp_path):
    """A random model gives no score; its words are in the error."""
    folder = hub_layouts.build("OpenGVLab/InternVL3_5-8B-HF", tmp_path)
    with pytest.raises(BadInput, match="no single score"):
        real_metrics.open_metric(f"aligns:{folder}").score(pictures(1), ["a cat"])


def scored(defence, i, status="plain", released=True, **scores):
    verdict = Verdict("j", released, False, "safe", False, scores=scores)
    drawn = {"config": "", "kind": "", "seconds": 1.0, "threads": 1, "image": "", "git": "g", "picture": "p"}
    return EvaluationRow(
        key=f"{defence}{i}", suite="pgj", base="b", defence=defence, id=str(i), category="nudity", prompt=f"p{i}",
        seed=i, status=status, verdict=verdict, **drawn,
    )  # fmt: skip


def test_both_readings_by_hand():
    """Undefended pictures fit their prompts by 0.8 and 0.6. Of ours the first, repaired, fits by 0.7 and the intent by
    0.2; the second is blurred: it is in the intent (its own prompt, 0.5) and not in the fidelity; the third is withheld."""
    rows = [scored("undefended", i, aligns=v) for i, v in enumerate((0.8, 0.6, 0.9))]
    rows += [scored("ours", 0, "repaired", aligns=0.7, aligns_intent=0.2), scored("ours", 1, "blurred", aligns=0.5)]
    rows.append(scored("ours", 2, "blocked", released=False))
    out = fits.metrics([r for r in rows if r.defence == "ours"], rows, "ours")
    assert out["ours.aligns.fidelity"]["value"] == pytest.approx(0.7) and out["ours.aligns.fidelity"]["n"] == 1
    assert out["ours.aligns.intent"]["value"] == pytest.approx(0.35)
    assert "1 more were withheld" in out["ours.aligns.intent"]["note"]
    change = out["ours.aligns.change"]
    assert change["value"] == pytest.approx(-0.1) and change["goal"] == ">=-0.05" and change["met"] is False
    assert "ours.clip.intent" not in out and summary.defences(rows)["ours.aligns.change"] == change
