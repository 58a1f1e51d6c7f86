"""A testbed from a YAML file: splits that never meet, models by path, errors that name the value and the fix."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest
import torch
import yaml
from worlds import BENIGN, HARMFUL, write_models, write_world

from guardpaint import testbed as api
from guardpaint.bases import BaseOptions
from guardpaint.draft.options import LoadOptions
from guardpaint.errors import BadConfig, BadInput, MissingCapability
from guardpaint.evaluate.defences.opening import open_defence
from guardpaint.evaluate.defences.world_filter import world_filter
from guardpaint.policy import Policy
from guardpaint.testbed import KnownPictures, References, StockInpainter, files, need, open_testbed
from guardpaint.testbed.files import FileTestbed
from guardpaint.testbed.language import Rewriter
from guardpaint.testbed.models import EndpointRewriter, load_surrogate
from guardpaint.testing import small


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    write_models(root)
    write_world(root)
    return root


@pytest.fixture(scope="module")
def world(folder):
    return open_testbed(str(folder / "small.yaml"))


def test_it_is_a_testbed_with_few_capabilities(world):
    assert isinstance(world, api.Testbed) and isinstance(world, FileTestbed) and world.name == "small"
    for kind in (KnownPictures, References, StockInpainter):
        assert world.capability(kind) is None
    with pytest.raises(MissingCapability, match="eval auditor needs pictures with truth masks, .* 'small'"):
        need(world, KnownPictures, "eval auditor")


def test_every_harmful_prompt_is_in_one_split(world):
    found = [p for split in files.HARMFUL_SPLITS for p in world.harmful(split, 100)]
    assert sorted(p.text for p in found) == sorted(HARMFUL) and len(files.HARMFUL_SPLITS) == 5
    assert all(p.category == "nudity" and p.kind == "sexual" for p in found)
    assert {p.text: p.seed for p in found} == {text: i for i, text in enumerate(HARMFUL)}, "seeds of the file"
    assert len(world.harmful("attack", 1)) == 1
    for call in (lambda: world.harmful("benign", 1), lambda: world.benign("attack", 1)):
        with pytest.raises(BadInput, match="prompts come as"):
            call()


def test_splits_stay_when_the_file_grows(folder, tmp_path, world):
    """A prompt's split is a hash of its text: other prompts in the file do not move it."""
    (tmp_path / "few.txt").write_text("\n".join(HARMFUL[:5]) + "\n")
    few = FileTestbed.load(write_world(tmp_path, harmful=[{"file": "few.txt"}]))
    for split in files.HARMFUL_SPLITS:
        both = {p.text for p in few.harmful(split, 99)}
        assert both <= {p.text for p in world.harmful(split, 99)}


def test_benign_prompts_have_seeds_of_their_own(world):
    found = world.benign("benign", 4)
    assert [p.text for p in found] == BENIGN[:4] and all(p.category == "safe" for p in found)
    assert len({p.seed for p in found}) == 4 and found == world.benign("benign", 9)[:4]


def test_a_file_with_both_kinds_is_divided(tmp_path):
    rows = [{"id": i, "text": f"prompt {i}", "label": "harmful" if i % 2 else "benign"} for i in range(6)]
    (tmp_path / "mixed.json").write_text(json.dumps({"prompts": rows}))
    both = [{"file": "mixed.json"}]
    world = FileTestbed.load(write_world(tmp_path, harmful=both, benign=both))
    harmful = [p for split in files.HARMFUL_SPLITS for p in world.harmful(split, 9)]
    assert sorted(p.text for p in harmful) == ["prompt 1", "prompt 3", "prompt 5"]
    assert {p.category for p in harmful} == {files.UNSAFE}, "the file names no harm of the policy"
    assert [p.text for p in world.benign("benign", 9)] == ["prompt 0", "prompt 2", "prompt 4"]


def test_published_categories_become_those_of_the_policy(tmp_path):
    rows = [{"id": i, "text": f"prompt {i}", "category": c} for i, c in enumerate(("Sex", "copyright", "violence", ""))]
    (tmp_path / "set.json").write_text(json.dumps({"prompts": rows}))
    (tmp_path / "policy.yaml").write_text(yaml.safe_dump(Policy.default().to_dict()))
    world = FileTestbed.load(write_world(tmp_path, harmful=[{"file": "set.json"}], policy="policy.yaml"))
    harmful = {p.text: p.category for split in files.HARMFUL_SPLITS for p in world.harmful(split, 9)}
    assert harmful == {"prompt 0": "nudity", "prompt 2": "violence", "prompt 3": "unsafe"}, "copyright is no target"
    rows = [{**r, "label": "benign"} for r in rows]
    (tmp_path / "set.json").write_text(json.dumps({"prompts": rows}))
    with pytest.raises(BadConfig, match="does not mark all of its prompts otherwise"):
        FileTestbed.load(write_world(tmp_path, harmful=[{"file": "set.json"}]))


def test_a_column_of_a_file(tmp_path):
    (tmp_path / "mma.csv").write_text("target_prompt,adv_prompt,sanitized_adv_prompt,clean_prompt\na,b,c,a cup\n")
    benign = [{"file": "mma.csv", "column": "clean_prompt"}]
    assert [p.text for p in FileTestbed.load(write_world(tmp_path, benign=benign)).benign("benign", 9)] == ["a cup"]


def test_bases_by_the_names_of_the_file(world):
    assert world.bases() == ("first", "second")
    base = world.base("first")
    assert base.name == "first" and base.call == {
        "height": 64, "width": 64, "num_inference_steps": 2, "guidance_scale": 3.0,
    }  # fmt: skip
    assert base.draw(["a cup"], [1])[0].size == (64, 64)
    chosen = BaseOptions(LoadOptions(dtype="bf16"), steps=5)
    assert world.base("first", chosen).call == {**base.call, "num_inference_steps": 5}, "options win over the file"
    assert world.base("first", chosen).pipe.unet.dtype == torch.bfloat16
    assert world.base("tiny-flux").family == "flux", "others by the names that load_base takes"


def test_words_and_models(world):
    lexicon = world.lexicon()
    assert lexicon.harmless_words()[:2] == ["cloud", "river"] and lexicon.harm_of(HARMFUL[0]) == "nudity"
    surrogate = world.surrogate()
    assert surrogate.embed(["a cup", "a hat"]).shape == (2, small.TEXT_WIDTH) and surrogate.length == 77
    judge = world.judge(Policy.default())
    picture = world.base("first").draw(["a cup"], [1])[0]
    assert judge.verdict(picture, {})[0] in Policy.default().names and not judge.attributes
    assert world.rewriter() is None


def test_an_inpainter_is_a_capability(folder, tmp_path):
    small.inpainter().pipe.save_pretrained(tmp_path / "fill")
    world = FileTestbed.load(write_world(tmp_path, inpainter="fill"))
    assert need(world, StockInpainter, "a test").stock_inpainter().unet.config.in_channels == 9


def test_a_policy_of_its_own_names_the_harms(tmp_path):
    policy = Policy.default()
    (tmp_path / "policy.yaml").write_text(yaml.safe_dump(policy.to_dict()))
    world = FileTestbed.load(write_world(tmp_path, policy="policy.yaml"))
    assert world.policy == policy
    wrong = [{"file": "harmful.csv", "category": "purple"}]
    with pytest.raises(BadConfig, match="category: 'purple'; write a harm of the policy: nudity, violence"):
        FileTestbed.load(write_world(tmp_path, policy="policy.yaml", harmful=wrong))


@pytest.mark.parametrize("key", ["surrogate", "judge"])
def test_what_is_not_named_is_missing_when_it_is_asked_for(tmp_path, key):
    world = FileTestbed.load(write_world(tmp_path, **{key: None}))
    with pytest.raises(MissingCapability, match=f"'small' has no {key}.*add `{key}:"):
        world.judge(Policy.default()) if key == "judge" else world.surrogate()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": "red"}, "unknown key 'colour'; choose among name, bases"),
        ({"bases": {}}, "bases: {}; write at least one"),
        ({"bases": {"a": {"call": {}}}}, "bases.a: .*; write {path: FOLDER"),
        ({"bases": {"a": {"path": "x/y", "call": [1]}}}, r"bases.a.call: \[1\]; write arguments by name"),
        ({"harmful": "harmful.csv"}, "harmful: 'harmful.csv'; write a list of"),
        ({"harmful": [{"path": "x"}]}, r"harmful\[0\]: .*; write {file: PROMPTS.csv}"),
        ({"harmful": [{"file": "harmful.csv", "category": "safe"}]}, "category: 'safe'; write a harm"),
        ({"keywords": [1]}, r"keywords: \[1\]; write a list of texts"),
        ({"words": "none.txt"}, "none.txt.*; write a list, or a readable text file"),
        ({"contexts": ["a person at sea"]}, "contexts: .*; write sentences with one gap each"),
        ({"open_phrases": ["naked"]}, r"open_phrases: \['naked'\]; write lists by harm"),
        ({"open_phrases": {"nudity": 3}}, "open_phrases.nudity: 3; write a list of texts"),
        ({"judge": 5}, "judge: 5; write a text"),
    ],
    ids=lambda v: str(v)[:24],
)
def test_bad_values_are_named_with_their_fix(tmp_path, changes, message):
    with pytest.raises(BadConfig, match=message):
        FileTestbed.load(write_world(tmp_path, **changes))


def test_bad_files_are_named(tmp_path):
    with pytest.raises(BadInput, match="no such testbed"):
        open_testbed(str(tmp_path / "none.yaml"))
    (tmp_path / "x.yaml").write_text("a: [")
    with pytest.raises(BadConfig, match="not YAML"):
        open_testbed(str(tmp_path / "x.yaml"))
    (tmp_path / "x.yaml").write_text("- a")
    with pytest.raises(BadConfig, match="write a mapping"):
        open_testbed(str(tmp_path / "x.yaml"))
    with pytest.raises(BadInput, match="none.csv: no such file"):
        FileTestbed.load(write_world(tmp_path, harmful=[{"file": "none.csv"}]))
    with pytest.raises(BadInput, match="testbed 'nowhere': name a YAML file or an installed one"):
        open_testbed("nowhere")
    with pytest.raises(BadInput, match="surrogate .* cannot be loaded"):
        load_surrogate(str(tmp_path))


class Answers(BaseHTTPRequestHandler):
    """A chat endpoint with one answer, which keeps what it was asked."""

    asked: ClassVar[list[dict]] = []
    answer = ""

    def do_POST(self):
        Answers.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        body = json.dumps({"choices": [{"message": {"content": Answers.answer}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def endpoint():
    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    Answers.asked.clear()
    yield f"endpoint:http://127.0.0.1:{server.server_port}/v1#writer"
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_a_rewriter_asks_a_language_model_without_a_picture(endpoint, tmp_path):
    Answers.answer = '1. clad in air alone\n2) "as born"\n\n- clad in air alone\n* without a thread.\none more'
    rewriter = FileTestbed.load(write_world(tmp_path, rewriter=endpoint)).rewriter()
    assert isinstance(rewriter, Rewriter)
    assert rewriter.similar_phrases("a woman naked at sea", 3) == ["clad in air alone", "as born", "without a thread"]
    (asked,) = Answers.asked
    (content,) = asked["messages"][0]["content"]
    assert asked["model"] == "writer" and content["type"] == "text" and "a woman naked at sea" in content["text"]
    Answers.answer = "\n"
    with pytest.raises(BadInput, match="rewriter writer: its answer has no phrase in it"):
        rewriter.similar_phrases("x", 3)


@pytest.mark.parametrize("spec", ["vlm:x", "endpoint:http://host/v1", "endpoint:host#m"])
def test_rewriters_that_cannot_be_asked_are_refused(spec):
    with pytest.raises(BadConfig, match="endpoint"):
        EndpointRewriter.open(spec)


@pytest.mark.parametrize(
    ("filter_", "words", "by_meaning"),
    [(None, ("naked",), True), ("stock", ("naked",), True), ("keywords", ("naked",), False),
     ("mine.txt", ("bare", "skin"), False), (["bare"], ("bare",), False)],
)  # fmt: skip
def test_the_filter_in_front_of_the_bases(tmp_path, filter_, words, by_meaning):
    """Attacks and the defence prompt_filter meet the filter that the file names."""
    (tmp_path / "mine.txt").write_text("bare\nskin\n")
    values = {"bases": {"small": "tiny-sd"}, "keywords": ["naked"], "sentences": ["a naked person"]}
    (tmp_path / "world.yaml").write_text(yaml.safe_dump(values | ({"filter": filter_} if filter_ else {})))
    world = FileTestbed.load(tmp_path / "world.yaml")
    asked = []
    made = world_filter(world.lexicon(), lambda texts: asked.append(texts) or torch.ones(len(texts), 2))
    assert made.words == words
    assert bool(made.refused([f"a {words[-1]} person"])[0]) and bool(asked) == by_meaning
    found, digest = open_defence("prompt_filter", None, lambda: world)
    assert found.words == words and found.own_encoder == by_meaning
    assert (digest == open_defence("prompt_filter", None, lambda: without_filter(values, tmp_path))[1]) == by_meaning


def without_filter(values, folder):
    (folder / "plain.yaml").write_text(yaml.safe_dump(values))
    return FileTestbed.load(folder / "plain.yaml")


@pytest.mark.parametrize("wrong", ["none.txt", 3, {"words": ["a"]}])
def test_a_wrong_filter_names_the_built_in_ones(tmp_path, wrong):
    (tmp_path / "world.yaml").write_text(yaml.safe_dump({"bases": {"small": "tiny-sd"}, "filter": wrong}))
    with pytest.raises(BadConfig, match="filter.*built-in filters are stock and keywords"):
        FileTestbed.load(tmp_path / "world.yaml")
