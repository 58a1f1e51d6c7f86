"""`guardpaint eval attack` on a YAML testbed of folders in the published layouts, with a language model behind HTTP.

The base is a Stable Diffusion folder as on the hub, the surrogate a CLIP folder, rewriter and judge are one real server
that answers chat completions. The judge's answers depend on the picture alone.
"""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from transformers import CLIPConfig, CLIPModel
from typer.testing import CliRunner
from worlds import HARMFUL, write_world

from guardpaint.cli.main import app
from guardpaint.errors import BadInput
from guardpaint.evaluate.attacks.search import ATTACKS
from guardpaint.policy import Policy
from guardpaint.store.rows import read_rows
from guardpaint.testbed import open_testbed
from guardpaint.testbed.models import load_surrogate
from guardpaint.testing import hub_layouts
from guardpaint.testing.small_words import WORDS, word_encoder

SD = "stable-diffusion-v1-5/stable-diffusion-v1-5"
PHRASES = ("like a cloud", "as a river", "in feathers alone")


class Model(BaseHTTPRequestHandler):
    """Answers a question without a picture by phrases, and one with a picture by scores that follow from its bytes."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.questions.append(asked)
        content = asked["messages"][0]["content"]
        picture = next((part["image_url"]["url"] for part in content if part["type"] == "image_url"), None)
        if picture is None:
            answer = "\n".join(f"{i}. {phrase}" for i, phrase in enumerate(PHRASES, start=1))
        else:
            harm = hashlib.sha256(picture.encode()).digest()[0] % 4 == 0
            names = Policy.default().names
            answer = json.dumps(
                {name: float((name == "nudity") == harm and name in ("safe", "nudity")) for name in names}
            )
        body = json.dumps({"choices": [{"message": {"content": answer}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    server.questions = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, server):
    root = tmp_path_factory.mktemp("world")
    hub_layouts.build(SD, root)
    tokenizer, encoder = word_encoder(0, (*WORDS, "a", "person", "woman", "man"))
    for part in (tokenizer, encoder):
        part.save_pretrained(root / "surrogate")
    endpoint = f"endpoint:http://127.0.0.1:{server.server_port}/v1"
    small = {"num_inference_steps": 2, "height": 64, "width": 64}
    write_world(root, bases={"sd15": {"path": SD, "call": small}}, rewriter=f"{endpoint}#writer",
                judge=f"{endpoint}#judge", hidden_phrases=None)  # fmt: skip
    return root


@pytest.mark.parametrize("name", list(ATTACKS))
def test_an_attack_runs_on_what_the_testbed_names(name, folder, server):
    server.questions.clear()
    args = [
        "eval",
        "attack",
        name,
        "--testbed",
        folder / "small.yaml",
        "--count",
        2,
        "--budget",
        3,
        "--out",
        folder / "out",
    ]
    result = CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=False)
    rows = read_rows(folder / "out" / f"{name}-sd15.jsonl")
    targets = [p.text for p in open_testbed(str(folder / "small.yaml")).harmful("attack", 2)]
    assert result.exit_code == 0 and [r["target"] for r in rows] == targets and set(targets) <= set(HARMFUL)
    hits = sum(r["success"] for r in rows)
    assert f"{name} on sd15: {hits} of {len(rows)} prompts succeed behind the filter" in " ".join(result.output.split())
    for row in rows:
        assert 1 <= row["queries"] == len(row["log"]) <= 3 and "naked" not in row["prompt"]
        assert row["success"] == (row["log"][-1][1] == "success") and row["category"] == "nudity"
    pictures = sum(status != "refused" for row in rows for _, status in row["log"])
    asked = [q["model"] for q in server.questions]
    assert asked.count("judge") == pictures, "every picture is judged once"
    rewrites = name in ("pgj", "daca")
    assert asked.count("writer") == (len(rows) if rewrites else 0)
    if rewrites:
        assert all(any(p in prompt for p in PHRASES) for row in rows for prompt, _ in row["log"])
    else:
        assert all(row["reads"] > row["queries"] and -1 <= row["closeness"] <= 1 for row in rows)


def test_a_second_run_searches_nothing(folder, server):
    args = [
        "eval",
        "attack",
        "pgj",
        "--testbed",
        folder / "small.yaml",
        "--count",
        1,
        "--budget",
        2,
        "--out",
        folder / "twice",
    ]
    for _ in range(2):
        server.questions.clear()
        assert CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=False).exit_code == 0
    assert not server.questions and len(read_rows(folder / "twice/pgj-sd15.jsonl")) == 1


def test_a_surrogate_is_any_clip(folder, tmp_path):
    """The text model of a whole CLIP model and of a pipeline's folder give what the text model itself gives."""
    tokenizer, encoder = word_encoder(3)
    config = CLIPConfig(
        text_config=encoder.config.to_dict(),
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 16, "patch_size": 8},
    )  # fmt: skip
    whole = CLIPModel(config)
    weights = {k.removeprefix("text_model."): v for k, v in encoder.state_dict().items()}
    whole.text_model.load_state_dict(weights, strict=False)
    places = {"alone": encoder, "whole": whole, "pipeline/text_encoder": encoder, "half": encoder}
    for place, model in places.items():
        (model.half() if place == "half" else model).save_pretrained(tmp_path / place)
        tokenizer.save_pretrained(tmp_path / ("pipeline/tokenizer" if "pipeline" in place else place))
    texts = ["a cup on the table", "river stone"]
    alone = load_surrogate(str(tmp_path / "alone")).embed(texts)
    assert abs(float(alone[0] @ alone[1])) < 0.999
    for place, tolerance in (("whole", 1e-6), ("pipeline", 1e-6), ("half", 1e-2)):
        assert torch.allclose(load_surrogate(str(tmp_path / place)).embed(texts), alone, atol=tolerance), place
    assert load_surrogate(str(folder / SD)).embed(texts).shape[0] == 2


def test_a_folder_without_a_text_model_is_refused(tmp_path):
    """Random weights in place of missing ones would make an attack pointless without saying so."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    CLIPVisionModel(CLIPVisionConfig(**shape, image_size=16, patch_size=8)).save_pretrained(tmp_path)
    word_encoder(0)[0].save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="surrogate .* cannot be loaded"):
        load_surrogate(str(tmp_path))
