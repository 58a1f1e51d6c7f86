"""The catalogue that `guardpaint train` reads: this package's models, their trainers and the shipped weights."""

from __future__ import annotations

from pathlib import Path

from guardpaint.train.catalogue import Catalogue, Inputs, Trainer
from guardpaint.train.engine import Run
from paperdolls.files import ASSETS


def trainers() -> dict[str, Trainer]:
    """Trainers of the world's base models and of its oracle."""
    from paperdolls.models import distil, generator, oracle, reader, tiny_decoder, vae
    from paperdolls.models.recipe import GeneratorConfig

    def train_generator(run: Run, inputs: Inputs) -> None:
        start = generator.Start(inputs.optional("warm"), inputs.optional("teacher"), inputs.optional("words"))
        generator.run(run, inputs.path("vae"), start)

    def train_oracle(run: Run, inputs: Inputs) -> None:
        warm, soft, drawn = (inputs.optional(name) for name in ("warm", "soft", "drawn"))
        oracle.run(run, oracle.Sources(inputs.paths("vae"), warm, soft, drawn))

    return {
        "vae": Trainer(lambda run, inputs: vae.run(run, inputs.optional("warm")), vae.VaeConfig, takes=("warm",)),
        "generator": Trainer(train_generator, GeneratorConfig, ("vae",), ("warm", "teacher", "words")),
        "reader": Trainer(lambda run, inputs: reader.run(run), GeneratorConfig),
        "distil": Trainer(
            lambda run, inputs: distil.run(run, inputs.path("teacher")), distil.DistilConfig, ("teacher",)
        ),
        "tiny": Trainer(
            lambda run, inputs: tiny_decoder.run(run, inputs.path("vae")), tiny_decoder.TinyConfig, ("vae",)
        ),
        "oracle": Trainer(train_oracle, oracle.OracleRecipe, ("vae",), ("warm", "soft", "drawn")),
    }


def shipped(name: str) -> Path | None:
    """The folder of a model in the assets; None if it is not shipped."""
    folder = ASSETS / name
    return folder if (folder / "card.json").exists() else None


CATALOGUE = Catalogue(Path(__file__).parents[1] / "configs", trainers, shipped)
