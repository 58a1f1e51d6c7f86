"""Labelers: small random-initialised models of the real classes, and a server that misbehaves."""

from __future__ import annotations

import pytest
import torch
import vlms
from endpoints import Endpoint
from PIL import Image
from safetensors.torch import load_file, save_file

from guardpaint.data import labelers
from guardpaint.data.labelers import Asking, ChatLabeler, DetectorLabeler, EndpointLabeler, ShieldLabeler, open_labeler
from guardpaint.errors import BadConfig, BadInput
from guardpaint.policy import Policy

POLICY = Policy.default()
PICTURES = [Image.new("RGB", (64, 48), c) for c in ("red", "blue")]
GOOD = '{"safe": 0.7, "nudity": 0.2, "violence": 0.1}'


@pytest.mark.parametrize("family", sorted(vlms.CHAT))
def test_chat_models_answer_and_are_never_taken_for_safe(family):
    """A random model talks nonsense: every answer is there, none is readable, pictures do reach the model."""
    model, processor = vlms.CHAT[family]()
    labeler = ChatLabeler(model, processor, Asking(POLICY, longest=6), family)
    answers = labeler.label(PICTURES)
    assert len(answers) == 2 and all(a.scores is None and a.problem for a in answers)
    captions = labeler.caption(PICTURES)
    assert len(captions) == 2
    assert labeler.label(PICTURES) == answers, "greedy answers repeat"


def test_the_picture_matters():
    """The same question on another picture gives another distribution over the first word."""
    model, processor = vlms.CHAT["qwen2.5-vl"]()
    seen = []
    model.register_forward_hook(lambda module, args, out: seen.append(out.logits[:, -1].detach()))
    ChatLabeler(model, processor, Asking(POLICY, longest=1), "q").label(PICTURES)
    assert not torch.allclose(seen[0][0], seen[0][1])


def test_labelers_are_moved_like_other_parts():
    model, processor = vlms.CHAT["qwen2.5-vl"]()
    chat = ChatLabeler(model, processor, Asking(POLICY), "q")
    shield = ShieldLabeler(*vlms.shieldgemma(), POLICY, "s")
    detector = DetectorLabeler(*vlms.grounding_dino(), POLICY, labelers.PHRASES)
    for labeler in (chat, shield, detector):
        assert labeler.to("meta") is labeler
        assert all(p.is_meta for p in labeler.model.parameters())


def test_self_consistency_asks_again():
    model, processor = vlms.CHAT["qwen2.5-vl"]()
    labeler = ChatLabeler(model, processor, Asking(POLICY, passes=3, longest=3), "q")
    answer = labeler.label(PICTURES[:1])[0]
    assert answer.problem == "3 of 3 passes unreadable" and answer.raw.count("---") == 2


def test_sampling_leaves_every_generator_of_torch_alone(monkeypatch):
    """torch.manual_seed would also seed the devices whose state is not restored."""
    model, processor = vlms.CHAT["qwen2.5-vl"]()
    labeler = ChatLabeler(model, processor, Asking(POLICY, passes=2, longest=3), "q")
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.random.get_rng_state()
    first = labeler.label(PICTURES)
    assert torch.equal(torch.random.get_rng_state(), before) and seeded == []
    torch.rand(3)
    assert labeler.label(PICTURES) == first, "the seed of the labeler decides"


def test_a_saved_chat_model_loads_by_name(tmp_path):
    model, processor = vlms.CHAT["llava"]()
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    labeler = open_labeler(f"vlm:{tmp_path}", Asking(POLICY, longest=2))
    assert len(labeler.label(PICTURES)) == 2


def incomplete(folder, model, processor, part):
    """A saved model whose weights with `part` in their names were lost."""
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if part not in name}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "make", "part"),
    [
        ("vlm", vlms.CHAT["llava"], "lm_head"),
        ("shieldgemma", vlms.shieldgemma, "post_layernorm"),
        ("detector", vlms.grounding_dino, "enc_output_norm"),
    ],
)
def test_a_labeler_with_missing_weights_is_refused(kind, make, part, tmp_path):
    """transformers would draw them at random, and the answers would look like any others."""
    incomplete(tmp_path, *make(), part)
    with pytest.raises(BadInput, match="weights of .* are missing"):
        open_labeler(f"{kind}:{tmp_path}", Asking(POLICY))


def test_a_guard_model_scores_every_harm():
    labeler = ShieldLabeler(*vlms.shieldgemma(), POLICY, "shield")
    for answer in labeler.label(PICTURES):
        assert set(answer.scores) == set(POLICY.names)
        harms = [answer.scores[n] for n in POLICY.names[1:]]
        assert answer.scores["safe"] == pytest.approx(1 - max(harms)) and all(0 <= h <= 1 for h in harms)


def test_a_detector_scores_by_its_best_box():
    labeler = DetectorLabeler(*vlms.grounding_dino(), POLICY, labelers.PHRASES)
    answers = labeler.label(PICTURES)
    assert all(set(a.scores) == set(POLICY.names) and 0 <= a.scores["nudity"] <= 1 for a in answers)
    with pytest.raises(BadConfig, match="no phrases for \\['violence'\\]"):
        DetectorLabeler(*vlms.grounding_dino(), POLICY, {"nudity": ["x"]})


def endpoint(server, **more):
    settings = {"timeout": 0.5, "retries": 2, "wait": 0.01, "parallel": 1, **more}
    return EndpointLabeler(server.url, "some-model", Asking(POLICY), key="k", **settings)


def test_an_endpoint_gets_picture_policy_and_key():
    with Endpoint(GOOD) as server:
        answer = endpoint(server).label(PICTURES[:1])[0]
    assert answer.scores == {"safe": 0.7, "nudity": 0.2, "violence": 0.1}
    asked = server.asked[0]
    assert asked["path"] == "/v1/chat/completions" and asked["key"] == "Bearer k"
    image, text = asked["body"]["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,") and "Policy:" in text["text"]


@pytest.mark.parametrize("trouble", [500, 503, 429, None, {"choices": []}, {"choices": [{"message": {}}]}, "hang"])
def test_trouble_is_tried_again(trouble):
    with Endpoint(trouble, GOOD) as server:
        assert endpoint(server).label(PICTURES[:1])[0].scores is not None
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("trouble", "problem", "tries"),
    [(500, "HTTP 500", 3), (401, "HTTP 401", 1), (None, "not a chat completion", 3), ("garbage", "no JSON object", 1)],
)
def test_lasting_trouble_is_unreadable(trouble, problem, tries):
    with Endpoint(trouble) as server:
        answer = endpoint(server).label(PICTURES[:1])[0]
    assert answer.scores is None and problem in answer.problem and len(server.asked) == tries


def test_no_server_is_unreadable():
    answer = EndpointLabeler("http://127.0.0.1:9/v1", "m", Asking(POLICY), retries=0).label(PICTURES)[1]
    assert answer.scores is None and "no answer" in answer.problem


def test_order_is_kept_side_by_side():
    with Endpoint(GOOD, GOOD, "nonsense", GOOD) as server:
        answers = endpoint(server, parallel=1).label([PICTURES[0]] * 4)
    assert [a.scores is None for a in answers] == [False, False, True, False]


def test_captions_over_an_endpoint():
    with Endpoint("a red square", "I cannot help with that") as server:
        assert endpoint(server).caption(PICTURES) == ["a red square", None]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("magic", "write vlm:MODEL"),
        ("vlm:", "write vlm:MODEL"),
        ("endpoint:http://x/v1", "name the model after a #"),
        ("endpoint:ftp://x#m", "must start with http"),
    ],
)
def test_bad_descriptions_are_named(spec, message):
    with pytest.raises(BadConfig, match=message):
        open_labeler(spec, Asking(POLICY))


@pytest.mark.parametrize("kind", ["vlm", "shieldgemma", "detector"])
def test_missing_models_are_named(kind, tmp_path):
    with pytest.raises(BadInput, match="cannot be loaded"):
        open_labeler(f"{kind}:{tmp_path}", Asking(POLICY))


def test_bad_ways_of_asking_are_named():
    with pytest.raises(BadConfig, match="passes=0"):
        Asking(POLICY, passes=0)
    with pytest.raises(BadConfig, match="timeout=0"):
        EndpointLabeler("http://x", "m", Asking(POLICY), timeout=0)
