"""Labels by eye: agreement by hand, the reference they make, and the page that takes them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from label_pages import POLICY, grey_pictures
from label_pages import label_page_of as page
from typer.testing import CliRunner

from guardpaint.cli.data import app
from guardpaint.data import hand_labels, label_page, labelling
from guardpaint.data.hand_labels import HandLabel
from guardpaint.data.store import Corpus, Example, key_of
from guardpaint.errors import BadInput


def heeds_interrupts():
    """A shell starts its background jobs deaf to Ctrl-C, and their children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def labels_of(**said):
    """Labels of pictures 0, 1, …: one letter of safe, nudity, violence, unsure for each; a dot for none."""
    names = {"s": "safe", "n": "nudity", "v": "violence", "u": "unsure"}
    return [
        HandLabel(str(i), who, names[letter])
        for who, letters in said.items()
        for i, letter in enumerate(letters)
        if letter != "."
    ]


def test_kappa_by_hand():
    """Eight of ten alike; both say safe six times and nudity four times: chance 0.36 + 0.16, κ = 0.28/0.48."""
    one, two = labels_of(ann="ssssssnnnn"), labels_of(bob="sssssnnnns")
    found = hand_labels.agreements(one + two)[0]
    assert (found.n, found.same, found.labellers) == (10, 8, ("ann", "bob"))
    assert found.kappa == pytest.approx(0.28 / 0.48)
    assert found.interval is not None and found.interval[0] < found.kappa < found.interval[1]
    assert sorted(found.differences) == [("nudity", "safe", 1), ("safe", "nudity", 1)]
    assert hand_labels.kappa(["safe"] * 3, ["safe"] * 3) is None, "two who always say the same"
    perfect = hand_labels.kappa_interval(["safe", "nudity"], ["safe", "nudity"])
    assert perfect is not None and perfect[0] < 0.5, "two pictures prove little"


def test_pictures_that_one_labeller_left_out_do_not_count():
    found = hand_labels.agreements(labels_of(ann="sn..", bob="s..n", cid="ssss"))
    assert [(a.labellers, a.n) for a in found] == [(("ann", "bob"), 1), (("ann", "cid"), 2), (("bob", "cid"), 2)]


def test_the_reference_is_what_labellers_agree_on():
    """Alike, disputed, unsure, seen by one; then the dispute is settled."""
    labels = labels_of(ann="snuv", bob="svu.")
    assert {k: v["label"] for k, v in hand_labels.reference(labels).items()} == {"0": "safe", "3": "violence"}
    assert hand_labels.disputed(labels) == ["1"]
    settled = [*labels, HandLabel("1", "cid", "nudity", "swimwear", settled=True)]
    assert hand_labels.reference(settled)["1"] == {"label": "nudity", "case": "swimwear"}
    assert hand_labels.disputed(settled) == []


def test_the_last_label_of_a_labeller_counts(tmp_path):
    path = tmp_path / "l.jsonl"
    for label in ("nudity", "safe"):
        hand_labels.add_label(path, HandLabel("a", "ann", label))
    assert [x.label for x in hand_labels.read_labels(path, POLICY)] == ["safe"]
    path.write_text('{"key": "a", "labeller": "ann", "label": "lewd"}\n{}\n')
    with pytest.raises(BadInput, match=r"l\.jsonl:1: not a label by eye"):
        hand_labels.read_labels(path, POLICY)


def test_several_categories_are_one_label():
    assert hand_labels.joined_label(["violence", "nudity"], POLICY) == "nudity+violence"
    for wrong in (["safe", "nudity"], ["unsure", "nudity"], [], ["lewd"]):
        with pytest.raises(BadInput, match="one of safe, nudity, violence or unsure"):
            hand_labels.joined_label(wrong, POLICY)


def test_a_reference_is_read_from_either_file(tmp_path):
    for label in labels_of(ann="sn", bob="sv"):
        hand_labels.add_label(tmp_path / "l.jsonl", label)
    assert labelling.read_reference(tmp_path / "l.jsonl", POLICY) == {"0": {"label": "safe", "case": "other"}}
    (tmp_path / "r.csv").write_text("key,label,case\na,violence+nudity,crowd\n")
    assert labelling.read_reference(tmp_path / "r.csv", POLICY)["a"]["label"] == "nudity+violence"
    (tmp_path / "r.csv").write_text("key,label\na,safe+nudity\n")
    with pytest.raises(BadInput, match=r"r\.csv:2"):
        labelling.read_reference(tmp_path / "r.csv", POLICY)
    with pytest.raises(BadInput, match="no picture has a label"):
        labelling.read_reference(tmp_path / "none.jsonl", POLICY)


def test_agreement_by_command(tmp_path):
    path = tmp_path / "l.jsonl"
    for label in labels_of(ann="ssssssnnnn", bob="sssssnnnns"):
        hand_labels.add_label(path, label)
    said = CliRunner().invoke(app, ["agreement", str(path), "--policy", "paper"])
    assert said.exit_code == 0 and "8 of 10 pictures alike, κ 0.58" in said.output, said.output
    assert "1 × ann safe, bob nudity" in said.output and "8 pictures in the reference, 2 disputed" in said.output
    said = CliRunner().invoke(app, ["agreement", str(tmp_path / "none.jsonl")])
    assert isinstance(said.exception, BadInput)


@pytest.fixture
def pictures(tmp_path):
    return grey_pictures(tmp_path / "pictures")


def test_pictures_come_from_a_folder_a_corpus_or_rows(pictures, tmp_path):
    """The same bytes have the same key in a folder and in a corpus; rows have their own keys."""
    of_folder = label_page.find_items(pictures)
    assert sorted(item.case for item in of_folder) == ["sport"] * 3 + ["swimwear"] * 3
    corpus = Corpus(tmp_path / "corpus")
    files = sorted(pictures.rglob("*.png"))
    examples = [Example(key_of(f.read_bytes()), f.read_bytes(), None, "s", None) for f in files]
    corpus.add("s", examples, {"read": 6, "kept": 6, "repeated": 0, "broken": 0})
    of_corpus = label_page.find_items(tmp_path / "corpus")
    assert {i.key for i in of_corpus} == {i.key for i in of_folder} and of_corpus[0].load().size == (40, 30)
    rows = pictures / "rows.jsonl"
    stored = [{"key": "r1", "image": "sport/4.png"}, {"key": "r2", "image": ""}, {"key": "r3", "image": "sport/5.png"}]
    rows.write_text("".join(json.dumps(r) + "\n" for r in stored))
    assert [i.key for i in label_page.find_items(rows)] == ["r1", "r3"]
    few = label_page.find_items(pictures, count=2)
    assert len(few) == 2 and [i.key for i in few] == [i.key for i in label_page.find_items(pictures, count=2)]
    assert [i.key for i in label_page.find_items(tmp_path / "corpus", {examples[0].key})] == [examples[0].key]
    for place, wanted, message in (
        (pictures, {"zz"}, "no picture with the key 'zz'"),
        (tmp_path / "nowhere", None, "no such corpus"),
    ):
        with pytest.raises(BadInput, match=message):
            label_page.find_items(place, wanted)


def ask(address, body=None):
    """Status and text of a request."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(address, data), timeout=10) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_only_who_knows_the_address_sees_and_labels(pictures, tmp_path):
    out = tmp_path / "l.jsonl"
    with page(pictures, out) as address:
        key = json.loads(ask(address + "state")[1])["items"][0]["key"]
        root = address.rsplit("/", 2)[0]
        answer = {"key": key, "labels": ["safe"]}
        for wrong in (root + "/", root + "/state", root + f"/picture/{key}", root + "/x/"):
            assert ask(wrong)[0] == 404
        assert ask(root + "/label", answer)[0] == 404 and not out.exists()
        assert ask(address + f"picture/{key}")[1].startswith(b"\x89PNG")
        assert ask(address + "picture/../../etc/passwd")[0] == 404
        refused = (
            {"key": "zz", "labels": ["safe"]},
            {"key": key, "labels": ["lewd"]},
            {"key": key, "labels": ["nudity", "violence"]},
            {"labels": 3},
            [],
            {"key": key, "labels": ["safe"], "case": "x" * 20_000},
        )
        for wrong in refused:
            assert ask(address + "label", wrong)[0] in (400, 413), wrong
        assert not out.exists()
        assert ask(address + "label", {**answer, "case": "crowd", "seconds": 1.234})[0] == 200
    assert hand_labels.read_labels(out, POLICY) == [HandLabel(key, "ann", "safe", "crowd", 1.23)]


def test_every_labeller_has_an_order_of_their_own(pictures, tmp_path):
    orders = []
    for who in ("ann", "bob"):
        with page(pictures, tmp_path / "l.jsonl", who) as address:
            orders.append([i["key"] for i in json.loads(ask(address + "state")[1])["items"]])
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]


def test_disagreements_are_settled_on_the_page(pictures, tmp_path):
    out = tmp_path / "l.jsonl"
    keys = sorted(item.key for item in label_page.find_items(pictures))
    for key in keys:
        hand_labels.add_label(out, HandLabel(key, "ann", "safe"))
        hand_labels.add_label(out, HandLabel(key, "bob", "nudity" if key == keys[0] else "safe"))
    with page(pictures, out, "cid", settling=True) as address:
        state = json.loads(ask(address + "state")[1])
        assert [i["key"] for i in state["items"]] == [keys[0]]
        assert state["items"][0]["said"] == ["ann: safe", "bob: nudity"] and state["disputed"] == 1
        status, reply = ask(address + "label", {"key": keys[0], "labels": ["nudity"]})
        assert status == 200 and json.loads(reply)["disputed"] == 0
    assert hand_labels.reference(hand_labels.read_labels(out, POLICY))[keys[0]]["label"] == "nudity"
    with pytest.raises(BadInput, match="disagree on none"), page(pictures, out, "cid", settling=True):
        pass


def test_a_broken_picture_does_not_stop_the_page(pictures, tmp_path):
    (pictures / "sport/broken.png").write_bytes(b"not a picture")
    with page(pictures, tmp_path / "l.jsonl") as address:
        keys = [i["key"] for i in json.loads(ask(address + "state")[1])["items"]]
        statuses = [ask(address + f"picture/{key}")[0] for key in keys]
    assert sorted(statuses) == [200] * 6 + [422]


def test_the_command_says_what_is_wrong_before_anybody_works(pictures, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"a": 1}\n{"b": 2}\n')
    command = ["hand-label", str(pictures), "--no-browser", "--out"]
    for more, message in (
        ([str(bad), "--labeller", "ann"], "not a label by eye"),
        ([str(tmp_path / "l.jsonl"), "--labeller", " "], "give a name"),
        ([str(tmp_path / "l.jsonl"), "--labeller", "ann", "--keys", str(tmp_path / "none")], "cannot be read"),
    ):
        said = CliRunner().invoke(app, [*command, *more])
        assert isinstance(said.exception, BadInput) and message in str(said.exception), message


def test_ctrl_c_ends_the_page_and_keeps_the_labels(pictures, tmp_path):
    """The command in a process of its own: one label, Ctrl-C, five pictures left; the same again, no label lost."""
    out = tmp_path / "l.jsonl"
    command = [sys.executable, "-m", "guardpaint.cli", "data", "hand-label", str(pictures), "--labeller", "ann"]
    command += ["--out", str(out), "--no-browser", "--policy", "paper"]
    for left in (5, 4):
        running = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heeds_interrupts
        )
        first = running.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/\S+/", first).group()
        state = json.loads(ask(address + "state")[1])
        key = next(i["key"] for i in state["items"] if i["key"] not in state["own"])
        assert ask(address + "label", {"key": key, "labels": ["safe"]})[0] == 200
        running.send_signal(signal.SIGINT)
        said, problem = running.communicate(timeout=60)
        assert running.returncode == 0 and f"{left} pictures left" in said, (said, problem)
        assert len(hand_labels.read_labels(out, POLICY)) == 6 - left
