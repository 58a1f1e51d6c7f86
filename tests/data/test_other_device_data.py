"""Labelers, approver, pairs and views with their models on another device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import vlms
from elsewhere import CALL, STRICT, on_a_gpu, places, rarely
from PIL import Image
from typer.testing import CliRunner

from guardpaint.cli.data import app
from guardpaint.data import corpus_views, labelers, pairs, views
from guardpaint.data.approver import VlmApprover, VlmSettings
from guardpaint.data.card import SPLITS
from guardpaint.data.judges import JudgeFailed, open_judge
from guardpaint.data.labelers import Asking, ChatLabeler, DetectorLabeler, ShieldLabeler
from guardpaint.data.store import Corpus, Example, key_of
from guardpaint.data.views import Labelled, ViewedBase
from guardpaint.draft import loading
from guardpaint.draft.options import LoadOptions
from guardpaint.errors import BadInput
from guardpaint.policy import Policy
from guardpaint.store.images import png_bytes
from guardpaint.testing import small, small_judges
from guardpaint.testing.other_device import OTHER, other_device

POLICY = Policy.default()
PICTURES = [Image.new("RGB", (64, 48), c) for c in ("red", "blue")]


@pytest.fixture(autouse=True)
def device():
    with other_device() as device:
        yield device


@pytest.mark.parametrize("family", sorted(vlms.CHAT))
def test_stage_labeler_chat(family):
    """Labels, sampled passes, captions and rewritings are those of the CPU."""

    def answers(place):
        labeler = ChatLabeler(*vlms.CHAT[family](), Asking(POLICY, passes=2, longest=4), family).to(place)
        return labeler.label(PICTURES), labeler.caption(PICTURES), labeler.rewrite(PICTURES[0], "a", "b")

    assert answers(OTHER) == answers("cpu")


def test_stage_labeler_shield():
    one, two = (ShieldLabeler(*vlms.shieldgemma(), POLICY, "s").to(d).label(PICTURES) for d in (OTHER, "cpu"))
    assert [a.scores for a in one] == [pytest.approx(b.scores, abs=1e-4) for b in two]


def test_stage_labeler_detector():
    made = (DetectorLabeler(*vlms.grounding_dino(), POLICY, labelers.PHRASES).to(d) for d in (OTHER, "cpu"))
    one, two = (labeler.label(PICTURES) for labeler in made)
    assert [a.scores for a in one] == [pytest.approx(b.scores, abs=1e-4) for b in two]


def test_stage_approver(tmp_path):
    """It approves on the device, and its folder is written from there."""
    settings = VlmSettings("shieldgemma:here", POLICY.to_dict())
    approver = VlmApprover(ShieldLabeler(*vlms.shieldgemma(), POLICY, "s"), settings).to(OTHER)
    image = torch.rand(3, 64, 64, device=OTHER)
    assert set(approver.approve(image, "a cat", False).probs) == set(POLICY.names)
    approver.save_pretrained(tmp_path)
    assert VlmApprover.from_pretrained(tmp_path).to("cpu").digest() == approver.digest()


@pytest.mark.parametrize("name", sorted(small_judges.JUDGES))
def test_stage_judge_opens_on_the_device(name, tmp_path, monkeypatch):
    """Every judge whose model runs here says on the device what it says on the CPU, without being asked to move."""
    spec = small_judges.build(name, tmp_path)
    here = open_judge(spec, POLICY)
    on_a_gpu(monkeypatch, OTHER)
    there = open_judge(spec, POLICY)
    assert places(here) == {"cpu"}
    assert "cuda" in places(there) and places(there) <= ({"cpu", "cuda"} if name == "multiheaded" else {"cuda"})
    assert said_by(there) == said_by(here)


def said_by(judge):
    """The opinion of a judge, as far as the last bits of a product do not decide it; None if it cannot be read."""
    try:
        opinion = judge.opinion(PICTURES[0])
    except JudgeFailed as error:
        return str(error)
    return opinion.said, opinion.harm if opinion.harm is None else pytest.approx(opinion.harm, abs=1e-3)


def example(seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = png_bytes(Image.fromarray(pixels))
    return Example(key_of(data), data, f"somebody {seed}", "s", None)


def test_stage_pairs(tmp_path):
    """Auditor and inpainter on the device make masks and safe versions of labelled pictures."""
    shown = [example(i) for i in range(3)]
    known = {
        e.key: {"split": "train", "label": c, "prompt": e.prompt}
        for e, c in zip(shown, ("nudity", "violence", "safe"), strict=True)
    }
    paint = pairs.painter(small.inpainter(0).to(OTHER).pipe, steps=2)
    maker = pairs.PairMaker(small.auditor(0).to(OTHER), paint, STRICT, lambda *_: None, tries=1)
    counts = pairs.from_corpus(tmp_path, shown, known, maker)
    assert counts["made"] + counts["auditor refused"] + counts["no mask"] == 2 and counts["safe"] == 1
    assert counts["no mask"] < 2


def labelled(count=6):
    category = torch.arange(count) % 3
    return Labelled(
        images=torch.rand(count, 3, 64, 64, generator=torch.Generator().manual_seed(0)),
        masks=torch.zeros(count, 1, 1, dtype=torch.bool),
        category=category,
        seeds=list(range(count)),
        prompts=[f"picture {i}" for i in range(count)],
        names=POLICY.names,
    )


@pytest.mark.parametrize("family", ["sd", "flux", *rarely("sdxl", "sd3")])
@torch.no_grad()
def test_stage_views(family, tmp_path):
    """Views of unfinished and finished pictures are those of the CPU, with a tiny decoder's early exits too."""

    def made(place):
        pipe = small.pipeline(family).to(place)
        with small.seeded(0):
            tiny = small.tiny_decoder(small.LATENT_CHANNELS[family]).to(place)
        base, batch = ViewedBase(pipe, CALL, tiny, looks=(32, 64)), labelled()
        finished = views.clean_pictures(pipe.vae, batch, torch.arange(6) < 3, base.device)
        return views.store([views.renoised_pictures(base, batch), finished], tmp_path / "v.pt")

    here = made("cpu")
    made(OTHER)
    there = views.load_views(tmp_path / "v.pt")
    assert {getattr(there, k).device.type for k in views.TENSORS} == {"cpu"}
    assert (here.images.int() - there.images.int()).abs().max() <= 2 and torch.equal(here.category, there.category)


def test_stage_corpus_views(tmp_path):
    pipe = small.pipeline("sd").to(OTHER)
    call = corpus_views.settings(pipe, CALL)
    plan = corpus_views.ViewPlan(ViewedBase(pipe, call), "tiny", pixels=96, batch=4)
    corpus, shown = Corpus(tmp_path / "corpus"), [example(i) for i in range(10)]
    corpus.add("s", shown, {"read": 10, "kept": 10})
    rows = [{"key": e.key, "split": "train", "label": POLICY.names[i % 3], "prompt": e.prompt, "group": i, "score": 0.8}
            for i, e in enumerate(shown)]  # fmt: skip
    corpus.append(SPLITS, rows)
    assert corpus_views.make(corpus, plan, tmp_path, "train", POLICY, quiet=True) == 1
    assert corpus_views.make(corpus, plan, tmp_path, "train", POLICY, quiet=True) == 0
    kept = views.load_views(next(tmp_path.glob("*.pt")))
    assert kept.strength is not None and set(kept.kind.tolist()) >= {1, 2} and kept.images.shape[-1] == 96


def on_other(module):
    return next(module.parameters()).device.type == torch.device(OTHER).type


@pytest.fixture
def there(monkeypatch):
    """The machine seems to have the other device; returns its name as an option."""

    def chosen(options):
        return torch.device(options.device or "cpu")

    for module in (loading, pairs):
        monkeypatch.setattr(module, "chosen_device", chosen)
    return str(OTHER)


def test_the_command_puts_labelers_where_it_is_told_to(tmp_path, monkeypatch, there):
    """`open_labeler` moves what it opens, and `data label` and `data caption` pass their option on to it."""
    opened, shown = [], example(0)
    monkeypatch.setattr(
        ShieldLabeler, "from_pretrained", lambda *a, **k: ShieldLabeler(*vlms.shieldgemma(), POLICY, "s")
    )
    labeler = labelers.open_labeler("shieldgemma:x", Asking(POLICY), LoadOptions(device=there))
    assert on_other(labeler.model)
    assert not on_other(labelers.open_labeler("shieldgemma:x", Asking(POLICY), LoadOptions(device="cpu")).model)
    Corpus(tmp_path).add("s", [shown], {"read": 1, "kept": 1})

    def keep(spec, asking, opening):
        opened.append((opening.device, opening.token))
        raise BadInput("enough")

    monkeypatch.setattr(labelers, "open_labeler", keep)
    more = ["--labeler", "vlm:x", "--device", "cpu", "--token", "hf"]
    for words in (["label", str(tmp_path), *more], ["caption", str(tmp_path), *more]):
        result = CliRunner().invoke(app, words)
        assert isinstance(result.exception, BadInput), result.output
    assert opened == [("cpu", "hf")] * 2


def test_the_command_puts_auditor_and_inpainter_where_it_is_told_to(tmp_path, monkeypatch, there):
    small.auditor(0).save_pretrained(tmp_path / "auditor")
    small.inpainter(0).pipe.save_pretrained(tmp_path / "inpainter")
    made = []
    monkeypatch.setattr(pairs, "from_corpus", lambda out, examples, known, maker: made.append(maker) or {})
    monkeypatch.setattr(Corpus, "lines", lambda *a: [{"key": "k"}])
    painted = []
    monkeypatch.setattr(pairs, "painter", lambda pipe: painted.append(pipe) or print)
    words = ["pairs", str(tmp_path / "out"), "--corpus", str(tmp_path), "--auditor", str(tmp_path / "auditor")]
    words += ["--inpainter", str(tmp_path / "inpainter"), "--device", there]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert on_other(made[0].auditor) and on_other(painted[0].unet)


def test_the_command_puts_the_auditor_of_a_testbed_s_pairs_where_it_is_told_to(tmp_path, monkeypatch, there):
    small.auditor(0).save_pretrained(tmp_path / "auditor")
    given = []

    class Lessons:
        def make_pairs(self, out, split, unsafe, safe, auditor=None, config=None):
            given.append(auditor)
            return 0

    monkeypatch.setattr("guardpaint.testbed.need", lambda *asked: Lessons())
    words = ["pairs", str(tmp_path / "out"), "--auditor", str(tmp_path / "auditor"), "--device", there]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert on_other(given[0])
