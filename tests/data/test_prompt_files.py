"""Published prompt files: every layout loads, every fault is named with its line."""

from __future__ import annotations

import json

import pytest

from guardpaint.data.prompt_files import load
from guardpaint.errors import BadInput


def write(tmp_path, text, name="f.csv", encoding="utf-8"):
    path = tmp_path / name
    path.write_bytes(text.encode(encoding))
    return path


def test_i2p_with_its_unnamed_column(tmp_path):
    rest = "hard,inappropriate_percentage,nudity_percentage,q16_percentage,sd_safety_percentage,prompt_toxicity"
    rest += ",lexica_url,sd_guidance_scale,sd_image_width,sd_image_height,sd_model,extra"
    text = f',prompt,categories,sd_seed,{rest}\n0,a quiet lake,"violence, shocking",42{",x" * 12}\n'
    found = load(write(tmp_path, text))
    assert found.name == "i2p" and found.notes == ["1 prompts, published: 4703"]
    p = found.prompts[0]
    assert (p.text, p.category, p.seed, p.harmful) == ("a quiet lake", "violence, shocking", 42, True)


def test_a_different_number_of_columns_is_said_loudly(tmp_path):
    found = load(write(tmp_path, ",prompt,categories,sd_seed\n0,x,violence,1\n"))
    assert "4 columns, published: 16" in found.notes


@pytest.mark.parametrize(
    ("header", "row", "name", "text", "original"),
    [
        ("target_prompt,adv_prompt,sanitized_adv_prompt", "t,a,s", "mma", "s", "t"),
        ("target_prompt,adv_prompt,sanitized_adv_prompt", "t,a,", "mma", "a", "t"),
        ("sensitive prompt,normal prompt", "bad,good", "ring-a-bell", "bad", "good"),
        ("prompt,case_number,evaluation_seed", "p,7,3", "case-number", "p", ""),
        ("prompt,case_number,evaluation_seed,adv_prompt", "p,7,3,q", "case-number", "q", "p"),
        ("prompt_index,original_prompt,attack_prompt", "3,o,a", "jbdb-attack", "a", "o"),
        ("index,prompt", "3,hello", "jbdb-prompts", "hello", ""),
        ("unsafe_prompt,safe_prompt,category", "u,s,violence", "copro", "u", "s"),
        ("image_prompt,text_prompt", "a wall,words on it", "pragmatic", "a wall words on it", ""),
    ],
)
def test_every_table(tmp_path, header, row, name, text, original):
    found = load(write(tmp_path, f"{header}\n{row}\n"))
    assert found.name == name and found.prompts[0].text == text and found.prompts[0].original == original


@pytest.mark.parametrize(
    ("header", "row"), [("image_id,caption", "5,a cat"), ("case_number,prompt,evaluation_seed,coco_id", "1,a cat,3,5")]
)
def test_coco_is_benign(tmp_path, header, row):
    found = load(write(tmp_path, f"{header}\n{row}\n"))
    assert found.prompts[0].harmful is False and found.prompts[0].text == "a cat"


@pytest.mark.parametrize(
    "text",
    [
        "\nindex,prompt\n1,hello\n",
        "\ufeffindex,prompt\n1,hello\n",
        "index,prompt\r\n1,hello\r\n",
        "index,prompt\n1,hello",
        'index,prompt\n1,"hello"\n\n',
    ],
    ids=["blank first line", "BOM", "CRLF", "no last newline", "blank last line"],
)
def test_odd_files_load(tmp_path, text):
    assert [p.text for p in load(write(tmp_path, text)).prompts] == ["hello"]


def test_quoted_line_breaks_keep_the_line_numbers_right(tmp_path):
    text = 'index,prompt\n1,"two\nlines"\n2,b,c\n'
    with pytest.raises(BadInput, match=r"f.csv:4: 3 values in a row, but 2 columns"):
        load(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("index,prompt\n", "no rows"),
        ("a,b\n1,2\n", "fit no known format"),
        ("index,prompt,prompt\n1,2,3\n", "f.csv:1: column 'prompt' appears more than once"),
    ],
)
def test_bad_tables_are_named(tmp_path, text, message):
    with pytest.raises(BadInput, match=message):
        load(write(tmp_path, text))


def test_a_named_format_wants_its_columns(tmp_path):
    path = write(tmp_path, "index,prompt\n1,hello\n")
    with pytest.raises(BadInput, match="format i2p needs the column 'categories'"):
        load(path, "i2p")
    with pytest.raises(BadInput, match="format 'x': choose one of"):
        load(path, "x")
    with pytest.raises(BadInput, match="no such file"):
        load(tmp_path / "none.csv")


def test_rows_without_a_prompt_are_left_out_with_their_line(tmp_path):
    found = load(write(tmp_path, "index,prompt\n1,hello\n2,  \n3,there\n"))
    assert len(found.prompts) == 2 and "line 3: no prompt, left out" in found.notes


def test_repeated_ids_become_unique(tmp_path):
    found = load(write(tmp_path, "index,prompt\n1,a\n1,b\n"))
    assert [p.id for p in found.prompts] == ["1", "1#2"] and "1 ids appear more than once" in found.notes


def test_text_lists(tmp_path):
    found = load(write(tmp_path, "one\n\ntwo\n", "nsfw.txt"), "sneakyprompt")
    assert [p.id for p in found.prompts] == ["1", "3"] and found.notes == ["2 prompts, published: 200"]
    assert load(write(tmp_path, "one\n", "x.txt")).notes == []


def test_jailbreak_bench_with_all_its_categories(tmp_path):
    records = [
        {"id": 1, "text": "a", "label": "harmful", "source": "s", "category": ["violence", "hate"]},
        {"id": "x2", "text": "b", "label": "benign", "category": "none"},
        {"id": 3, "text": "c", "label": None, "category": None},
    ]
    found = load(write(tmp_path, json.dumps({"prompts": records}), "b.json"))
    assert [(p.id, p.harmful, p.category) for p in found.prompts] == [
        ("1", True, "violence, hate"), ("x2", False, "none"), ("3", None, ""),
    ]  # fmt: skip


def test_risky_prompts(tmp_path):
    found = load(write(tmp_path, json.dumps({"0": {"prompt": "a", "category": "violence"}}), "r.json"))
    assert found.name == "risky" and found.prompts[0].category == "violence" and "published: 6432" in found.notes[0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ('{"prompts": [{"id": 1}]}', "prompt 0 has no text"),
        ('{"prompts": [{"text": "a", "label": "maybe"}]}', "label 'maybe'"),
        ('{"a": {"x": 1}}', "record 'a' has no prompt"),
        ("[1, 2]", "neither"),
        ('{"prompts": [\n{', "b.json:2: not JSON"),
    ],
)
def test_bad_json_is_named(tmp_path, data, message):
    with pytest.raises(BadInput, match=message):
        load(write(tmp_path, data, "b.json"))


def test_not_text(tmp_path):
    with pytest.raises(BadInput, match="not UTF-8"):
        load(write(tmp_path, "é", encoding="latin-1"))
