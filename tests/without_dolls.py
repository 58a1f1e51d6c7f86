"""Runs every command that asks something of a world on a YAML testbed, in a process that cannot import `paperdolls`.

python without_dolls.py FOLDER     prints one JSON object: command → exit code, kind of error, message
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


class NoDolls:
    """Refuses to find the package."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "paperdolls":
            raise ImportError("paperdolls is not installed here")


sys.meta_path.insert(0, NoDolls())

import torch  # noqa: E402
from PIL import Image  # noqa: E402
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel  # noqa: E402
from typer.testing import CliRunner  # noqa: E402
from worlds import write_models, write_world  # noqa: E402

from guardpaint.data import views  # noqa: E402
from guardpaint.policy import Policy  # noqa: E402
from guardpaint.store import plugins  # noqa: E402
from guardpaint.testing import small  # noqa: E402
from guardpaint.train import rollouts  # noqa: E402

plugins.registered = lambda group: {}
torch.set_num_threads(1)


def write_parts(root: Path) -> None:
    """What commands take besides a testbed: a guard, states, views of a corpus, pictures, a vision model."""
    small.guard().save_pretrained(root / "guard")
    small.inpainter().pipe.save_pretrained(root / "fill")
    g = torch.Generator().manual_seed(0)
    mask = torch.zeros(64, 64, dtype=torch.bool)
    mask[20:40, 20:40] = True
    state = rollouts.State(
        "first", "a person", "plain", 1, 8, 10, 0.1, "nudity", torch.randn(4, 8, 8, generator=g),
        torch.rand(3, 64, 64, generator=g), mask,
    )  # fmt: skip
    (root / "rollouts").mkdir()
    rollouts.save_states([state], root / "rollouts" / "first-test.pt")
    n = 6
    corpus = views.Views(
        images=torch.randint(0, 255, (n, 3, 64, 64), generator=g, dtype=torch.uint8),
        masks=torch.zeros(n, 1, 1, dtype=torch.bool),
        category=torch.tensor([0, 1, 2] * 2),
        noise=torch.zeros(n),
        progress=torch.ones(n),
        kind=torch.zeros(n, dtype=torch.long),
        decoder=torch.zeros(n, dtype=torch.long),
        seeds=torch.arange(n),
        texts=tuple(f"picture {i}" for i in range(n)),
        strength=torch.rand(n, generator=g),
        names=Policy.default().names,
        origin="small",
    )
    views.store([corpus], root / "views" / "first-00000-test.pt")
    for name, colour in (("a", 40), ("b", 200)):
        (root / name).mkdir()
        for i in range(3):
            Image.new("RGB", (32, 32), (colour, 20 * i, 90)).save(root / name / f"{i}.png")
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    CLIPVisionModel(CLIPVisionConfig(**shape, image_size=32, patch_size=16)).save_pretrained(root / "vision")
    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    images.save_pretrained(root / "vision")


def commands(root: Path) -> dict[str, list[str]]:
    """Every command, by the name that its expectation has."""
    world, guard, run = ["--testbed", root / "small.yaml"], ["--guard", root / "guard"], root / "run"
    attack = ["--count", 1, "--budget", 1, "--out", root / "attacks", *world]
    evaluate = ["--base", "first", "--n", 2, "--out", run, *world]
    found = {f"attack {name}": ["attack", name, *attack] for name in
             ("pgj", "daca", "sneakyprompt", "ring_a_bell", "mma")}  # fmt: skip
    found |= {
        "prompts": ["prompts", root / "harmful.csv"],
        "run benign": ["run", "benign", "--defence", "undefended", "--defence", "ours", *guard, *evaluate],
        "run attack": ["run", "pgj", "--defence", "undefended", "--defence", "prompt_filter", "--attacks",
                       root / "attacks", *evaluate],
        "run file": ["run", root / "harmful.csv", "--defence", "post_hoc_block", *guard, *evaluate],
        "run post_hoc_inpaint": ["run", "benign", "--defence", "post_hoc_inpaint", *guard, *evaluate],
        "report": ["report", run, "--results", root / "evaluation.json", *world],
        "fid": ["fid", root / "a", root / "b", "--features", root / "vision"],
        "adaptive": ["adaptive", *guard, "--results", root / "x.json", *world],
        "auditor": ["auditor", "--auditor", root / "guard/auditor", "--views", root / "views", "--results",
                    root / "x.json", *world],
        "corpus-auditor": ["corpus-auditor", "--auditor", root / "guard/auditor", "--views", root / "views",
                           "--results", root / "corpus.json"],
        "inpainter": ["inpainter", "--model", f"base={root / 'fill'}", "--results", root / "x.json", *world],
        "proposers": ["proposers", *guard, "--rollouts", root / "rollouts", "--trials", 0, "--results",
                      root / "proposer.json", *world],
        "gtp": ["gtp", "--base", "first", *guard, "--count", 1, "--c", 1, "--results", root / "gtp.json", *world],
        "moment": ["moment", "--base", "first", *guard, "--count", 1, "--start", 0.5, "--out", root / "moment",
                   "--results", root / "moment.json", *world],
        "seed-pairs": ["seed-pairs", "--base", "first", *guard, "--prompts", 1, "--benign", 1, "--seeds", 2, "--out",
                       root / "pairs", "--results", root / "pairs.json", *world],
        "figures": ["figures", run, "--out", root / "figures"],
        "over-refusal": ["over-refusal", run, "--benign", "benign", "--harmful", "pgj", "--results",
                         root / "refusal.json"],
        "no testbed": ["attack", "pgj", "--out", root / "attacks"],
    }  # fmt: skip
    evaluated = {name: ["eval", *args] for name, args in found.items()}
    return {name: [str(a) for a in args] for name, args in {**evaluated, **others(root)}.items()}


def others(root: Path) -> dict[str, list[object]]:
    """Commands outside `guardpaint eval` that take a testbed."""
    world, guard, states = ["--testbed", root / "small.yaml"], ["--guard", root / "guard"], root / "states"
    (root / "ingest.yaml").write_text(
        "sources: [{name: own, format: testbed, path: 'paperdolls:train'}]\n", encoding="utf-8"
    )
    return {
        "rollouts states": ["rollouts", "states", "first", *guard, "--count", 1, "--out", states, *world],
        "rollouts play": ["rollouts", "play", *guard, "--split", "test", "--n", 2, "--out", root / "rollouts"],
        "data views": ["data", "views", "first", "--out", root / "scene-views", *world],
        "data pairs": ["data", "pairs", root / "scene-pairs", *world],
        "data ingest": ["data", "ingest", root / "ingest.yaml", "--out", root / "corpus"],
        "serve": ["serve", "--base", "tiny-sd", *guard],
    }


def main(root: Path) -> None:
    from guardpaint.cli.main import app

    write_models(root)
    write_world(root)
    write_parts(root)
    said = {}
    for name, args in commands(root).items():
        result = CliRunner().invoke(app, args)
        error = result.exception
        kind = "" if error is None or isinstance(error, SystemExit) else type(error).__name__
        said[name] = [result.exit_code, kind, str(error) if kind else result.output]
    assert not [m for m in sys.modules if m.partition(".")[0] == "paperdolls"]
    print("\n" + json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
