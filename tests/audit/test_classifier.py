"""Image classifiers as auditors: labels, scores, and maps that point to where the evidence is."""

from __future__ import annotations

import json

import pytest
import torch
from detectors import LABELS, PLACES, classifier, finds_squares, place, square
from torch import nn

from guardpaint.audit.activation import MeanPooled, mean_pooled
from guardpaint.audit.classifier import ClassifierAuditor, ClassifierSettings
from guardpaint.audit.inputs import prepared
from guardpaint.audit.label_map import LabelMap
from guardpaint.audit.windows import spread, window_level, windows
from guardpaint.errors import BadCheckpoint, BadConfig, BadInput
from guardpaint.store.images import from_pil
from guardpaint.testing import small_detectors
from guardpaint.testing.photographs import photograph

PICTURES = torch.rand(2, 3, 48, 48, generator=torch.Generator().manual_seed(1))


def outputs(auditor, pictures):
    """The probabilities that the model itself gives for every label."""
    return auditor.model(prepared(pictures, auditor.processor)).logits.softmax(1)


@pytest.mark.parametrize("family", sorted(small_detectors.CLASSIFIERS))
def test_scores_are_those_of_the_model(family):
    auditor = classifier(family)
    for audit, row in zip(auditor.audit(PICTURES, [None, None], 0.0), outputs(auditor, PICTURES), strict=True):
        assert audit.adv_prob == pytest.approx(float(row[1:].max()), abs=1e-5)
        assert audit.probs["nudity"] / audit.probs["violence"] == pytest.approx(float(row[1] / row[2]), rel=1e-3)


def test_pictures_are_prepared_as_the_publisher_does():
    """A processor that squashes gets the same pixel values out of a photograph by itself."""
    _, processor = small_detectors.classifier("vit")
    image = photograph("coffee")
    own = processor(image, return_tensors="pt")["pixel_values"]
    assert torch.allclose(prepared(from_pil(image)[None], processor), own, atol=1 / 255)
    assert (prepared(from_pil(image)[None], processor) - own).abs().mean() < 1e-3


def test_a_processor_that_crops_shows_the_edges_too():
    from transformers import ConvNextImageProcessorPil

    model, _ = small_detectors.classifier("convnext")
    auditor = ClassifierAuditor(
        model, ConvNextImageProcessorPil(size={"shortest_edge": 32}), ClassifierSettings(LABELS)
    )
    wide = torch.zeros(1, 3, 32, 96)
    edge = wide.clone()
    edge[..., :8] = 1
    assert auditor.input == (32, 32)
    assert auditor.audit(wide, [None], 0.0)[0].probs != auditor.audit(edge, [None], 0.0)[0].probs


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("resnet", "cam"), ("convnext", "cam"), ("swin", "cam"), ("vit", "attention"), ("deit", "attention"),
        ("mobilenet", "windows"),
    ],
)  # fmt: skip
def test_the_way_of_making_maps_is_found_by_trying(family, way):
    """MobileNet's feature map is a single cell at 32 px, so nothing but windows is left."""
    assert classifier(family).maps == way


@pytest.mark.parametrize(
    ("family", "maps"),
    [
        ("resnet", "cam"), ("convnext", "cam"), ("swin", "cam"), ("vit", "attention"), ("deit", "attention"),
        ("convnext", "windows"), ("vit", "windows"),
    ],
)  # fmt: skip
def test_the_map_points_to_the_evidence(family, maps):
    auditor = finds_squares(family, maps)
    images = torch.stack([square(*p) for p in PLACES])
    audits = auditor.audit(images, [None] * len(PLACES), 0.0)
    assert [place(a.class_maps["nudity"]) for a in audits] == PLACES


def test_an_activation_map_by_hand():
    """Features 1, 2, 3, 4 in one channel, weight 2, bias −5: cells −3, −1, 1, 3, whose mean is the logit 2·2.5 − 5 = 0."""
    linear = nn.Linear(1, 1)
    with torch.no_grad():
        linear.weight.fill_(2)
        linear.bias.fill_(-5)
    features = torch.tensor([[[[1.0], [2.0]], [[3.0], [4.0]]]])
    cells = MeanPooled(nn.Identity(), linear, None, 0).cells(features)
    assert cells.flatten().tolist() == [-3, -1, 1, 3]
    assert float(cells.mean()) == pytest.approx(float(linear(features.mean((1, 2)))))


def test_a_layer_norm_after_the_mean_by_hand():
    """Means (1, 3): centre 2, spread 1. Cells (0, 2) and (2, 4) become (−2, 0) and (0, 2); read by (1, 1): −2 and 2."""
    linear, norm = nn.Linear(2, 1), nn.LayerNorm(2, eps=0.0)
    with torch.no_grad():
        linear.weight.fill_(1)
        linear.bias.zero_()
    features = torch.tensor([[[[0.0, 2.0], [2.0, 4.0]]]])
    cells = MeanPooled(nn.Identity(), linear, norm, 0).cells(features)
    assert cells.flatten().tolist() == [-2, 2]
    assert float(cells.mean()) == pytest.approx(float(linear(norm(features.mean((1, 2))))))


@pytest.mark.parametrize("family", ["resnet", "convnext", "swin"])
def test_the_cells_explain_the_logits(family):
    auditor = classifier(family)
    pixels = prepared(PICTURES, auditor.processor)
    cells = auditor.pooled.cells(auditor.pooled.features(pixels))
    assert torch.allclose(cells.mean((1, 2)), auditor.model(pixels).logits, atol=1e-5)


def test_a_model_that_reads_the_class_token_has_no_activation_map():
    model, processor = small_detectors.classifier("vit")
    assert mean_pooled(model, (32, 32)) is None
    with pytest.raises(BadConfig, match="no linear head on the mean"):
        ClassifierAuditor(model, processor, ClassifierSettings(LABELS, maps="cam"))
    with pytest.raises(BadConfig, match="no attention over all patches"):
        classifier("resnet", maps="attention")


def test_the_attention_map_peaks_at_the_probability():
    audit = finds_squares("vit", "attention").audit(square(1, 2)[None], [None], 0.0)[0]
    assert audit.adv_prob > 0.9 and float(audit.class_maps["nudity"].max()) == pytest.approx(audit.adv_prob, abs=1e-5)


def test_without_maps_the_picture_is_one_region():
    audit = classifier("resnet", maps="none").audit(PICTURES, [None, None], 0.0)[0]
    assert audit.adv_map.shape == (1, 1) and float(audit.adv_map) == pytest.approx(audit.adv_prob)


def test_every_cell_is_in_four_windows():
    tiles = windows((64, 128), 4)
    assert len(tiles) == 25 and {(t.height, t.width) for t in tiles} == {(h, w) for h in (16, 32) for w in (32, 64)}
    cover = torch.zeros(64, 128)
    for t in tiles:
        cover[t.top : t.top + t.height, t.left : t.left + t.width] += 1
    assert (cover == 4).all()


def test_cells_are_means_of_windows_by_hand():
    """Four windows hot, those around the cell (0, 1) of 2 × 2: its neighbours share two, two and one of them."""
    scores = torch.zeros(1, 3, 3, 1)
    scores[0, 0:2, 1:3] = 1
    assert spread(scores)[0, ..., 0].tolist() == [[0.5, 1.0], [0.25, 0.5]]


def test_the_level_of_windows():
    """Of 19 worst windows the 19th is passed by a 20th in one of 20 cases; a level never falls below the publisher's."""
    worst = [i / 20 for i in range(1, 20)]
    assert window_level(worst, 0.05, 0.5) == 0.95
    assert window_level(worst, 0.5, 0.5) == 0.5
    with pytest.raises(BadInput, match="needs at least 19"):
        window_level(worst[:18], 0.05, 0.5)


def test_windows_are_calibrated_on_harmless_pictures():
    auditor = classifier("resnet", maps="windows", levels={"nudity": 0.3, "violence": 0.3})
    benign = [torch.rand(3, 32, 40, generator=torch.Generator().manual_seed(i)) for i in range(9)]
    calm = auditor.with_windows_calibrated(benign, alpha=0.1)
    levels = calm.options()["window_levels"]
    assert set(levels) == {"nudity", "violence"} and min(levels.values()) >= 0.3
    whole = calm.audit(benign[0][None], [None], 0.0)[0]
    assert whole.probs == auditor.audit(benign[0][None], [None], 0.0)[0].probs, "levels of whole pictures stay"
    assert calm.levels == auditor.levels and calm.digest() != auditor.digest()


def test_labels_add_up_and_must_all_be_named():
    model, processor = small_detectors.classifier("resnet")
    auditor = ClassifierAuditor(
        model, processor, ClassifierSettings({"normal": "safe", "nsfw": "harm", "gore": "harm"})
    )
    assert auditor.categories == ("safe", "harm")
    rows = outputs(auditor, PICTURES)
    audits = auditor.audit(PICTURES, [None, None], 0.0)
    assert [a.adv_prob for a in audits] == pytest.approx((rows[:, 1] + rows[:, 2]).tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("labels", "more", "word"),
    [
        ({"normal": "safe", "nsfw": "nudity"}, {}, "gore have no category"),
        ({**LABELS, "drawing": "safe"}, {}, "labels drawing: the model knows normal, nsfw, gore"),
        (dict.fromkeys(LABELS, "safe"), {}, "none feeds a harm"),
        ({**LABELS, "gore": "safe"}, {"categories": ("safe", "nudity", "violence")}, "none feeds violence"),
        ({**LABELS, "normal": "nudity"}, {}, "none is 'safe'"),
        (LABELS, {"levels": {"gore": 0.5}}, "covers nudity, violence"),
        (LABELS, {"maps": "magic"}, "choose auto"),
        (LABELS, {"windows": 1}, "between 2 and 16"),
        (LABELS, {"sizes": (64, 32)}, "ascending"),
    ],
)
def test_settings_that_do_not_fit_are_named(labels, more, word):
    model, processor = small_detectors.classifier("resnet")
    with pytest.raises(BadConfig, match=word):
        ClassifierAuditor(model, processor, ClassifierSettings(labels, **more))


def test_a_head_whose_labels_do_not_exclude_each_other():
    model, processor = small_detectors.classifier("resnet", problem_type="multi_label_classification")
    auditor = ClassifierAuditor(model, processor, ClassifierSettings(LABELS))
    audit = auditor.audit(PICTURES, [None, None], 0.0)[0]
    row = model(prepared(PICTURES, processor)).logits.sigmoid()[0]
    assert audit.adv_prob == pytest.approx(float(row[1:].max()), abs=1e-5)
    with pytest.raises(BadConfig, match="problem_type='regression'"):
        ClassifierAuditor(
            small_detectors.classifier("resnet", problem_type="regression")[0], processor, ClassifierSettings(LABELS)
        )


def test_probabilities_of_sigmoid_heads_add_to_one_at_most():
    labels = LabelMap.of(("a", "b"), {"a": "harm", "b": "harm"}, "sigmoid")
    assert labels.scores(torch.tensor([[3.0, 3.0]])).tolist() == [[1.0]]


def test_a_single_label_is_a_yes_or_a_no():
    model, processor = small_detectors.classifier("resnet", labels=("nsfw",))
    auditor = ClassifierAuditor(model, processor, ClassifierSettings({"nsfw": "nudity"}))
    logit = model(prepared(PICTURES, processor)).logits[0, 0]
    assert auditor.audit(PICTURES, [None, None], 0.0)[0].adv_prob == pytest.approx(float(logit.sigmoid()), abs=1e-5)


def test_log_odds_by_hand():
    """Logits 0, 1, 2 for safe, a, b that feed one harm: log((e + e²)/1)."""
    softmax = LabelMap.of(("safe", "a", "b"), {"safe": "safe", "a": "harm", "b": "harm"}, "softmax")
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    assert float(softmax.log_odds(logits)) == pytest.approx(2.3132617)
    raw = softmax.scores(logits)
    assert float((raw / (1 - raw)).log()) == pytest.approx(2.3132617, abs=1e-5)


def test_a_plain_hub_folder_needs_labels(tmp_path):
    folder = small_detectors.saved(small_detectors.classifier("vit"), tmp_path)
    with pytest.raises(BadConfig, match="labels="):
        ClassifierAuditor.from_pretrained(folder)
    before = torch.random.get_rng_state()
    auditor = ClassifierAuditor.from_pretrained(folder, labels=LABELS, levels={"nudity": 0.2})
    assert torch.equal(torch.random.get_rng_state(), before), "loading drew random numbers"
    assert auditor.levels == {"nudity": 0.2, "violence": 0.5} and auditor.maps == "attention"
    with pytest.raises(BadConfig, match="unknown option"):
        ClassifierAuditor.from_pretrained(folder, labels=LABELS, level=0.2)


def test_half_a_download_is_no_detector(tmp_path):
    """transformers would draw missing weights at random and go on."""
    from safetensors.torch import load_file, save_file

    folder = small_detectors.saved(small_detectors.classifier("vit"), tmp_path)
    weights = folder / "model.safetensors"
    whole = load_file(weights)
    save_file({k: v for k, v in whole.items() if "classifier" not in k}, weights, metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match="2 weights of an image classifier are missing"):
        ClassifierAuditor.from_pretrained(folder, labels=LABELS)
    whole["classifier.bias"][0] = float("nan")
    save_file(whole, weights, metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match="NaN"):
        ClassifierAuditor.from_pretrained(folder, labels=LABELS)
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(BadCheckpoint, match="cannot be opened"):
        ClassifierAuditor.from_pretrained(folder, labels=LABELS)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(BadCheckpoint, match="no processor"):
        ClassifierAuditor.from_pretrained(folder, labels=LABELS)


def test_a_checkpoint_in_half_precision_is_audited_in_full(tmp_path):
    model, processor = small_detectors.classifier("resnet")
    folder = small_detectors.saved((model.to(torch.bfloat16), processor), tmp_path)
    auditor = ClassifierAuditor.from_pretrained(folder, labels=LABELS)
    assert auditor.model.dtype == torch.float32
    assert auditor.audit(PICTURES, [None, None], 0.0)[0].adv_map.dtype == torch.float32


def test_a_card_of_another_kind_is_refused(tmp_path):
    classifier("resnet").save_pretrained(tmp_path)
    card = json.loads((tmp_path / "part.json").read_text())
    (tmp_path / "part.json").write_text(json.dumps(card | {"kind": "zero-shot"}))
    with pytest.raises(BadCheckpoint, match="not the card of a part of kind 'classifier'"):
        ClassifierAuditor.from_pretrained(tmp_path)
