"""A T5 that reads: answers by hand, what is unsaid is not asked, a run whose T5 a generator can start with."""

from __future__ import annotations

import pytest
import torch
import yaml

from guardpaint.errors import BadCheckpoint, BadConfig
from guardpaint.train.engine import Run
from paperdolls.captions import caption
from paperdolls.models import reader, recipes
from paperdolls.models.recipe import GeneratorConfig, Latents
from paperdolls.scene import sample_scene

SHAPE = {
    "family": "flux",
    "layers": 1,
    "single_layers": 1,
    "heads": 2,
    "text_width": 32,
    "other_tokens": 24,
    "captions": 2,
}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reader")
    file = folder / "t5.yaml"
    train = {"steps": 30, "batch_size": 16, "learning_rate": 0.003, "warmup": 2, "ema": 0.5, "seed": 1}
    file.write_text(yaml.safe_dump({"model": {**SHAPE, "scenes": 60}, "train": train}))
    reader.run(Run(file, folder / "run", quiet=True))
    return folder / "run"


def named(scene, text):
    found = reader.answers(scene, text)
    return {n: c[i] for (n, c), i in zip(reader.SLOTS.items(), found, strict=True) if i != reader.UNSAID}


def test_answers_are_what_the_caption_tells():
    for seed in range(300):
        scene = sample_scene(seed)
        text = caption(scene, 0)
        told = named(scene, text)
        assert told["kind"] == scene.kind and told["background"] == scene.background
        assert ("light" in told) == ("light" in text.mentions) and ("prop" in told) == ("prop" in text.mentions)
        for name, value in scene.attributes().items():
            assert told.get(name, value) == value
        if scene.kind == "nudity":
            assert told["garment"] == told["colour"] == "none"
        if "second_garment" in told:
            assert told["second_garment"] == (scene.figures[1].garment or "none")


def test_what_is_unsaid_is_not_asked():
    torch.manual_seed(0)
    net = reader.Reader(GeneratorConfig(**SHAPE), 50)
    ids = torch.randint(50, (2, 6))
    wanted = torch.full((2, len(reader.SLOTS)), reader.UNSAID)
    wanted[:, 0] = torch.tensor([3, 5])
    said = net(ids)[0].log_softmax(1)
    assert reader.losses(net, reader.Lesson(ids, wanted))["loss"].item() == pytest.approx(
        -(said[0, 3] + said[1, 5]).item() / 2, rel=1e-5
    )
    assert set(reader.accuracy(net, reader.Lesson(ids, wanted))) == {"kind"}


def test_it_learns_and_is_kept(done):
    lines = (done / "loss.csv").read_text().splitlines()
    column = lines[0].split(",").index("loss")
    values = [float(line.split(",")[column]) for line in lines[1:]]
    assert sum(values[-5:]) < 0.9 * sum(values[:5])
    assert (done / "model" / "card.json").exists()


def test_a_generator_starts_with_it(done):
    tokenizer = reader.t5_tokenizer(GeneratorConfig(**SHAPE), done / "tokenizer")
    text = reader.load_reader(done / "model", tokenizer)
    model = recipes.build(GeneratorConfig(**SHAPE), 60, len(tokenizer), Latents(4, 16), 1)
    model.read_with(text)
    assert all(torch.equal(a, b) for a, b in zip(model.text2.parameters(), text.parameters(), strict=True))
    wider = recipes.build(GeneratorConfig(**{**SHAPE, "text_width": 64}), 60, len(tokenizer), Latents(4, 16), 1)
    with pytest.raises(BadConfig, match="another shape"):
        wider.read_with(text)
    with pytest.raises(BadConfig, match="does not start with a reader"):
        recipes.build(
            GeneratorConfig(family="sd", channels=(16, 16, 16), text_width=32), 60, 0, Latents(4, 16), 1
        ).read_with(text)


def test_wrong_readers_are_named(done, tmp_path):
    with pytest.raises(BadCheckpoint, match="the trainer `reader`"):
        reader.load_reader(tmp_path, None)

    class Other:
        def get_vocab(self):
            return {}

    with pytest.raises(BadConfig, match="its tokenizer is another"):
        reader.load_reader(done / "model", Other())
