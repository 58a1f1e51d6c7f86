"""What `guardpaint train` learns of this package: its models, their trainers, and which of them ship trained."""

from __future__ import annotations

from pathlib import Path

from guardpaint.train.catalogue import Catalogue, Inputs, Trainer
from guardpaint.train.engine import Run
from paperdolls.files import ASSETS


def trainers() -> dict[str, Trainer]:
    """Trainers of the world's base models and of its oracle."""
    from paperdolls.models import distil, generator, oracle, reader, tiny_decoder, vae
    from paperdolls.models.recipe import GeneratorConfig
    from paperdolls.oracle import OracleConfig

    def train_generator(run: Run, given: Inputs) -> None:
        start = generator.Start(given.optional("warm"), given.optional("teacher"), given.optional("words"))
        generator.run(run, given.path("vae"), start)

    def train_oracle(run: Run, given: Inputs) -> None:
        warm, soft, drawn = (given.optional(name) for name in ("warm", "soft", "drawn"))
        oracle.run(run, oracle.Sources(given.paths("vae"), warm, soft, drawn))

    return {
        "vae": Trainer(lambda run, given: vae.run(run, given.optional("warm")), vae.VaeConfig, takes=("warm",)),
        "generator": Trainer(train_generator, GeneratorConfig, ("vae",), ("warm", "teacher", "words")),
        "reader": Trainer(lambda run, given: reader.run(run), GeneratorConfig),
        "distil": Trainer(lambda run, given: distil.run(run, given.path("teacher")), distil.DistilConfig, ("teacher",)),
        "tiny": Trainer(lambda run, given: tiny_decoder.run(run, given.path("vae")), tiny_decoder.TinyConfig, ("vae",)),
        "oracle": Trainer(train_oracle, OracleConfig, ("vae",), ("warm", "soft", "drawn")),
    }


def shipped(name: str) -> Path | None:
    """Folder of a model that lies in the assets."""
    folder = ASSETS / name
    return folder if (folder / "card.json").exists() else None


CATALOGUE = Catalogue(Path(__file__).parents[1] / "configs", trainers, shipped)
