"""What an auditor starts from: a pretrained ResNet, a tokenizer of its captions, an auditor that is trained further."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import yaml
from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification

from guardpaint.audit.model import AuditorConfig, AuditorScorer
from guardpaint.audit.text import BOS, load_tokenizer, save_tokenizer, token_batch, trained_tokenizer
from guardpaint.data import views
from guardpaint.data.views import Labelled
from guardpaint.errors import BadCheckpoint, BadConfig, BadInput
from guardpaint.train import auditor as trainer
from guardpaint.train.auditor_start import Start, new_auditor, pretrained_backbone
from guardpaint.train.catalogue import load_model
from guardpaint.train.engine import parse_config

SHAPE = {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [1, 2], "layer_type": "bottleneck"}
CAPTIONS = [f"a red coat on a quiet street, number {i}" for i in range(60)]


def resnet(folder, **changes):
    """A small random ResNet in the file layout of microsoft/resnet-101."""
    model = ResNetForImageClassification(ResNetConfig(**{**SHAPE, **changes}))
    model.save_pretrained(folder)
    return model


def test_the_backbone_is_the_folders(tmp_path):
    """Weights and shape are those of the folder, without its classification head; the other parts stay random."""
    saved = resnet(tmp_path)
    auditor = new_auditor(AuditorConfig.tiny(), 0, None, str(tmp_path))
    assert auditor.config.stage_channels == (16, 24) and auditor.config.stage_depths == (1, 2)
    assert auditor.config.stem_channels == 8 and auditor.config.layer_type == "bottleneck"
    want = saved.resnet.state_dict()
    assert all(torch.equal(value, want[key]) for key, value in auditor.backbone.state_dict().items())
    again = new_auditor(AuditorConfig.tiny(), 0, None, str(tmp_path))
    assert torch.equal(again.adv_head.weight, auditor.adv_head.weight)
    auditor.save_pretrained(tmp_path / "auditor")
    loaded = AuditorScorer.from_pretrained(tmp_path / "auditor")
    assert loaded.config == auditor.config and loaded.audit(torch.rand(1, 3, 64, 64), ["a hat"], 0.0)


def test_what_is_no_resnet_is_refused(tmp_path):
    tiny = ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=32)
    ViTForImageClassification(tiny).save_pretrained(tmp_path / "vit")
    with pytest.raises(BadCheckpoint, match="backbone"):
        pretrained_backbone(str(tmp_path / "vit"))
    resnet(tmp_path / "other", downsample_in_bottleneck=True)
    with pytest.raises(BadConfig, match="downsample_in_bottleneck=True"):
        pretrained_backbone(str(tmp_path / "other"))
    resnet(tmp_path / "pickled")
    (tmp_path / "pickled/model.safetensors").rename(tmp_path / "pickled/pytorch_model.bin")
    with pytest.raises(BadCheckpoint, match="only safetensors"):
        pretrained_backbone(str(tmp_path / "pickled"))
    with pytest.raises(BadCheckpoint, match="not a directory"):
        pretrained_backbone(str(tmp_path / "nowhere"))


def test_half_a_resnet_is_refused(tmp_path):
    """transformers would fill the missing weights with random ones."""
    from safetensors.torch import load_file, save_file

    resnet(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    dropped = next(k for k in state if k.endswith("convolution.weight"))
    save_file({k: v for k, v in state.items() if k != dropped}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadCheckpoint, match="1 weights of a ResNet are missing"):
        pretrained_backbone(str(tmp_path))


def test_a_tokenizer_learns_the_words_of_its_captions(tmp_path):
    """Frequent words are one token; other words and scripts are spelled; case does not count; saved and read again."""
    tokenizer = trained_tokenizer(CAPTIONS, 600)
    assert len(tokenizer.encode("a red coat").ids) == 3 and len(tokenizer.encode("A RED Coat").ids) == 3
    assert len(tokenizer.encode("xylophone").ids) > 1 and len(tokenizer.encode("猫").ids) > 0
    assert tokenizer.get_vocab_size() <= 600
    assert trained_tokenizer(reversed(CAPTIONS), 600).to_str() == tokenizer.to_str()
    save_tokenizer(tokenizer, tmp_path / "t.json")
    assert load_tokenizer(tmp_path / "t.json").encode("a quiet street").ids == tokenizer.encode("a quiet street").ids
    with pytest.raises(BadInput, match="there are none"):
        trained_tokenizer(["", ""], 600)


def test_no_prompt_can_contain_padding():
    """A prompt that names the special tokens is spelled, so that nothing in it is hidden from the auditor."""
    tokenizer = trained_tokenizer(CAPTIONS, 600)
    ids = token_batch(tokenizer, ["a coat <pad> <pad> street", "<bos> street"], 128)
    assert (ids[0] != 0).all() and int((ids[1] == tokenizer.token_to_id(BOS)).sum()) == 1


def test_a_caption_of_seventy_seven_words_fits_the_papers_auditor():
    """The model `auditor-paper` as the paper has it."""
    stage = load_model("auditor-paper").stage("auditor")
    recipe, _ = parse_config(stage.config, trainer.AuditorRecipe, "auditor-paper")
    config = recipe.config()
    assert recipe.backbone == "microsoft/resnet-101" and recipe.tokenizer == "bpe" and recipe.pairs == 0
    assert config.pool == config.quality_pool == "mean"
    assert recipe.losses["maps"] == recipe.losses["seam_maps"] == 0
    assert config.stage_channels == (256, 512, 1024, 2048) and config.stage_depths == (3, 4, 23, 3)
    words = [f"word{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(77)]
    tokenizer = trained_tokenizer([" ".join(words)] * 2, recipe.vocabulary)
    assert token_batch(tokenizer, [" ".join(words)], config.max_tokens).shape[1] == 78, "77 words after the start"


def corpus_views(folder):
    g = torch.Generator().manual_seed(0)
    for split, first in (("train", 0), ("validation", 100)):
        category = torch.arange(24) % 3
        texts = [f"a {('grey', 'red', 'blue')[c]} picture of a street" for c in category.tolist()]
        pictures = torch.rand(24, 3, 64, 64, generator=g)
        masks, seeds = torch.zeros(24, 1, 1, dtype=torch.bool), list(range(first, first + 24))
        batch = Labelled(pictures, masks, category, seeds, texts, ("safe", "nudity", "violence"))
        made = replace(batch.views(pictures, "clean"), strength=torch.where(category == 0, 0.0, 0.8))
        views.store([made], folder / f"small-{split}.pt")
    return folder


def write_config(path, **model):
    model = {"shape": {"small": True, "sizes": [64, 96]}, "tokenizer": "bpe", "vocabulary": 400, "pairs": 0, **model}
    train = {"steps": 4, "batch_size": 6, "learning_rate": 0.001, "warmup": 1, "validate_every": 2}
    path.write_text(yaml.safe_dump({"model": model, "train": train}))
    return path


def test_a_run_keeps_its_tokenizer_and_its_backbones_shape(tmp_path):
    """Stopped, given other captions, resumed: the tokens stay. Then trained further by another run."""
    resnet(tmp_path / "resnet")
    folder = corpus_views(tmp_path)
    config = write_config(tmp_path / "c.yaml", backbone=str(tmp_path / "resnet"))
    trainer.run(config, folder, tmp_path / "run", 0.0, quiet=True)
    first = (tmp_path / "run/tokenizer.json").read_text()
    file = tmp_path / "small-train.pt"
    other = replace(views.load_views(file), texts=tuple(f"something else {i}" for i in range(24)))
    views.store([other], file)
    trainer.run(config, folder, tmp_path / "run", None, quiet=True)
    model = AuditorScorer.from_pretrained(tmp_path / "run/model")
    assert model.tokenizer.to_str(pretty=True) == first
    assert model.config.vocab_size == model.tokenizer.get_vocab_size() < 400
    assert model.config.stage_channels == (16, 24) and len(model.tokenizer.encode("a red picture").ids) == 3
    trainer.run(config, folder, tmp_path / "more", None, Start(warm=tmp_path / "run/model"), quiet=True)
    more = AuditorScorer.from_pretrained(tmp_path / "more/model")
    assert more.tokenizer.to_str(pretty=True) == first and more.config == model.config
    assert "warm=" in json.loads((tmp_path / "more/model/card.json").read_text())["command"]


def test_a_backbone_can_be_named_on_the_command_line(tmp_path):
    """`--set backbone=DIR` replaces the one of the config, which need not exist here."""
    from typer.testing import CliRunner

    from guardpaint.cli.main import app

    resnet(tmp_path / "resnet")
    folder, config = corpus_views(tmp_path), write_config(tmp_path / "c.yaml", backbone="nobody/nowhere-101")
    command = ["train", "stage", "auditor", "--config", str(config), "--set", f"views={folder}", "--out"]
    said = CliRunner().invoke(app, [*command, str(tmp_path / "a")])
    assert isinstance(said.exception, BadCheckpoint) and "nobody/nowhere-101" in str(said.exception)
    said = CliRunner().invoke(app, [*command, str(tmp_path / "a"), "--set", f"backbone={tmp_path / 'resnet'}"])
    assert said.exit_code == 0, said.output
    assert AuditorScorer.from_pretrained(tmp_path / "a/model").config.stage_channels == (16, 24)


def test_settings_that_make_no_sense_are_named():
    for wrong in ({"tokenizer": "words"}, {"vocabulary": 10}, {"pairs": -1}):
        with pytest.raises(BadConfig, match="tokenizer="):
            trainer.AuditorRecipe(**wrong)
