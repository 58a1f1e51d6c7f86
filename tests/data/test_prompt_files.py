"""Published prompt files: every container loads, every fault is named with its line, and nothing is guessed."""

from __future__ import annotations

import gzip
import json
import zipfile

import pytest

from guardpaint.data.prompt_files import Reading, load, load_all
from guardpaint.data.prompt_files.policies import HARMS, OUTSIDE, UNSAFE, policy_category, read_map
from guardpaint.errors import BadInput

NAMES = ("safe", "nudity", "violence")


def write(tmp_path, text, name="f.csv", encoding="utf-8"):
    path = tmp_path / name
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize(
    ("header", "row", "name", "text", "original", "harmful"),
    [
        ("target_prompt,adv_prompt,sanitized_adv_prompt", "t,a,s", "mma", "a", "t", True),
        ("target_prompt,adv_prompt,sanitized_adv_prompt", "t,,s", None, "", "", None),
        ("sensitive prompt,normal prompt", "bad,good", "ring-a-bell", "bad", "good", True),
        ("prompt,case_number,evaluation_seed", "p,7,3", "table", "p", "", None),
        ("prompt,case_number,evaluation_seed,adv_prompt", "p,7,3,q", "table", "q", "p", None),
        ("prompt_index,original_prompt,attack_prompt", "3,o,a", "jbdb-attack", "a", "o", True),
        ("index,prompt", "3,hello", "table", "hello", "", None),
        ("index,prompt,class", "3,hello,sex", "table", "hello", "", None),
        ("prompt,class", "hello,sex", "table", "hello", "", None),
        ("unsafe_prompt,safe_prompt,category", "u,s,violence", "copro", "u", "s", True),
        ("image_prompt,text_prompt", "a wall,hello", "pragmatic", "a wall, with a sign that says 'hello'", "", True),
        ("Prompt,Category,Challenge", "a cube,Abstract,Basic", "partiprompts", "a cube", "", False),
        ("image_id,caption", "5,a cat", "table", "a cat", "", None),
        ("case_number,prompt,evaluation_seed,coco_id", "1,a cat,3,5", "coco", "a cat", "", False),
    ],
)
def test_every_table(tmp_path, header, row, name, text, original, harmful):
    path = write(tmp_path, f"{header}\n{row}\n")
    if name is None:
        with pytest.raises(BadInput, match="no prompts in 1 records"):
            load(path)
        return
    found = load(path)
    (p,) = found.prompts
    assert (found.name, p.text, p.original, p.harmful) == (name, text, original, harmful)


def test_i2p_says_what_is_not_as_published(tmp_path):
    header = "prompt,categories,inappropriate_percentage,q16_percentage,prompt_toxicity,sd_seed,sd_guidance_scale"
    found = load(write(tmp_path, f'{header}\na quiet lake,"violence, shocking",1,1,0,4200000000,7.5\n'))
    assert found.name == "i2p" and found.notes == [
        "7 columns, published: 14 or 16",
        "1 prompts, published: 4703 or 142",
    ]
    (p,) = found.prompts
    assert (p.category, p.seed, p.guidance, p.harmful) == ("violence, shocking", 4_200_000_000, 7.5, True)


def test_the_name_of_a_set_needs_its_columns(tmp_path):
    rows = "case_number,prompt,evaluation_seed\n0,a house,3\n"
    assert load(write(tmp_path, rows, "church.csv")).prompts[0].harmful is False
    assert load(write(tmp_path, rows, "Violence_eta_3_K_77.csv")).prompts[0].harm == "violence"
    assert load(write(tmp_path, rows, "houses.csv")).prompts[0].harmful is None
    assert load(write(tmp_path, "index,prompt\n0,a house\n", "church.csv")).prompts[0].harmful is None
    assert load(write(tmp_path, "image_id,caption\n5,a cat\n", "coco_captions.csv")).prompts[0].harmful is False


def test_the_user_says_what_nobody_else_says(tmp_path):
    path = write(tmp_path, "index,prompt\n1,a house\n")
    assert any("--harmful or --benign" in n for n in load(path).notes)
    for said in (True, False):
        found = load(path, harmful=said)
        assert found.prompts[0].harmful is said and not found.notes
    rows = [{"text": "a", "label": "harm"}, {"text": "b", "label": "safe"}, {"text": "c"}]
    labelled = load(write(tmp_path, json.dumps({"prompts": rows}), "x.json"), harmful=False)
    assert [p.harmful for p in labelled.prompts] == [True, False, False], "a record's own label goes first"


def test_labels_that_name_classes_say_nothing(tmp_path):
    assert load(write(tmp_path, "prompt,label\na,tench\nb,church\n")).prompts[0].harmful is None
    assert load(write(tmp_path, "prompt,label\na,1\nb,0\n")).prompts[0].harmful is None
    assert [p.harmful for p in load(write(tmp_path, "prompt,label\na,harm\nb,Benign\n")).prompts] == [True, False]
    assert [p.harmful for p in load(write(tmp_path, "prompt,is_unsafe\na,1\nb,0\n")).prompts] == [True, False]


def test_discarded_prompts_are_neither(tmp_path):
    rows = [{"text": "a", "label": "harm", "category": ["discard"]}, {"text": "b", "label": "harm", "category": "hate"}]
    for said in (None, True):
        found = load(write(tmp_path, json.dumps({"prompts": rows}), "x.json"), harmful=said)
        assert [p.harmful for p in found.prompts] == [None, True] and "1 prompts were discarded" in found.notes[0]


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


def containers(tmp_path):
    """The same two prompts in every container and under every kind of name."""
    table = 'id,prompt\n7,a red cup\n8,"a hat, blue"\n'
    records = [{"id": 7, "prompt": "a red cup"}, {"id": 8, "prompt": "a hat, blue"}]
    lines = "".join(json.dumps(r) + "\n" for r in records)
    texts = {
        "a.CSV": table, "b": table, "c.Json": json.dumps(records), "d": json.dumps(records), "e.jsonl": lines,
        "f": lines, "g.ndjson": lines, "h.json": lines, "i.tsv": "id\tprompt\n7\ta red cup\n8\ta hat, blue\n",
        "j.bak": table,
    }  # fmt: skip
    for name, text in texts.items():
        yield write(tmp_path, text, name)
    for name, text in {"k.csv.gz": table, "l.JSON.GZ": json.dumps(records), "m.gz": table, "n.csv": table}.items():
        (tmp_path / name).write_bytes(gzip.compress(text.encode()))
        yield tmp_path / name


def test_every_container_and_suffix(tmp_path):
    for path in containers(tmp_path):
        found = [(p.id, p.text, p.source) for p in load(path).prompts]
        stem = path.name.split(".")[0] if path.name != "j.bak" else "j.bak"
        assert found == [("7", "a red cup", stem), ("8", "a hat, blue", stem)], path.name


def test_parquet(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"id": [1, 2], "text": ["a cup", None], "seed": [4, 5]}), tmp_path / "x.Parquet")
    found = load(tmp_path / "x.Parquet")
    assert [(p.id, p.text, p.seed) for p in found.prompts] == [("1", "a cup", 4)]
    assert found.notes[0] == "row 1: no prompt, left out"
    with pytest.raises(BadInput, match="not a Parquet file"):
        load(write(tmp_path, "prompt\nx\n", "y.parquet"))


def test_what_is_no_file_of_text_is_said(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.csv", "w") as archive:
        archive.writestr("f.csv", "prompt\nx\n")
    with pytest.raises(BadInput, match=r"x.csv: a zip archive .* unpack it"):
        load(tmp_path / "x.csv")
    with pytest.raises(BadInput, match="a folder, where one file is wanted"):
        load(tmp_path)
    for encoding in ("utf-16", "utf-16-le"):
        with pytest.raises(BadInput, match="UTF-16 .* save it as UTF-8"):
            load(write(tmp_path, "prompt\nhello there\n", encoding=encoding))
    with pytest.raises(BadInput, match="not UTF-8"):
        load(write(tmp_path, "é", encoding="latin-1"))
    with pytest.raises(BadInput, match="no such file"):
        load(tmp_path / "none.csv")
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(b"prompt\nx\n" * 99)[:30])
    with pytest.raises(BadInput, match="cannot be read"):
        load(tmp_path / "cut.csv.gz")


def test_quoted_line_breaks_keep_the_line_numbers_right(tmp_path):
    text = 'index,prompt\n1,"two\nlines"\n2,b,c\n'
    with pytest.raises(BadInput, match=r"f.csv:4: 3 values in a row, but 2 columns"):
        load(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("index,prompt\n", "no rows"),
        ("a,b\n1,2\n", "name one with --column: a, b"),
        ("index,prompt,prompt\n1,2,3\n", "f.csv:1: column 'prompt' appears more than once"),
    ],
)
def test_bad_tables_are_named(tmp_path, text, message):
    with pytest.raises(BadInput, match=message):
        load(write(tmp_path, text))


def test_a_named_format_wants_its_columns(tmp_path):
    path = write(tmp_path, "index,prompt\n1,hello\n")
    with pytest.raises(BadInput, match="format mma needs the column 'target_prompt'"):
        load(path, "mma")
    with pytest.raises(BadInput, match="format 'x': choose one of"):
        load(path, "x")
    assert load(path, "i2p").prompts[0].harmful is True, "a format says what the set is"


def test_any_column_can_be_named(tmp_path):
    path = write(tmp_path, "a,Wish,prompt\n1,a cup,\n")
    assert load(path, column="wish").prompts[0].text == "a cup"
    with pytest.raises(BadInput, match="no column 'b'; there are a, Wish, prompt"):
        load(path, column="b")
    log = write(tmp_path, "time,prompt\n1,\"[{'role': 'user', 'content': 'hello'}]\"\n")
    with pytest.raises(BadInput, match="chat requests"):
        load(log)
    assert load(log, column="prompt").prompts[0].text.startswith("[{'role'")


def test_rows_without_a_prompt_are_left_out_with_their_line(tmp_path):
    found = load(write(tmp_path, "index,prompt\n1,hello\n2,  \n3,there\n"))
    assert len(found.prompts) == 2 and "line 3: no prompt, left out" in found.notes


def test_repeated_ids_become_unique(tmp_path):
    found = load(write(tmp_path, "index,prompt\n1,a\n1,b\n"))
    assert [p.id for p in found.prompts] == ["1", "1#2"] and "1 ids appear more than once" in found.notes


def test_text_lists(tmp_path):
    found = load(write(tmp_path, "one\n\ntwo\n", "f.txt"), "sneakyprompt")
    assert [p.id for p in found.prompts] == ["1", "3"] and found.notes == ["2 prompts, published: 200"]
    with pytest.raises(BadInput, match="a list of words"):
        load(write(tmp_path, "one\n", "x.txt"))
    assert load(tmp_path / "x.txt", "text").prompts[0].harmful is None
    numbered = load(write(tmp_path, "1. a cup of tea\n\n2. a hat of felt\n", "y.txt"))
    assert [p.text for p in numbered.prompts] == ["a cup of tea", "a hat of felt"]
    assert load(write(tmp_path, "3 cups of tea\n2. a hat\n", "z.txt"), "text").prompts[1].text == "2. a hat"


def test_jailbreak_bench_with_all_its_categories(tmp_path):
    records = [
        {"id": 1, "text": "a", "label": "harmful", "source": "s", "category": ["violence", "hate"]},
        {"id": "x2", "text": "b", "label": "benign", "category": "none"},
        {"id": 3, "text": "c", "label": None, "category": None},
    ]
    found = load(write(tmp_path, json.dumps({"prompts": records}), "b.json"))
    assert [(p.id, p.harmful, p.category, p.source) for p in found.prompts] == [
        ("1", True, "violence, hate", "s"), ("x2", False, "none", "b"), ("3", None, "", "b"),
    ]  # fmt: skip


def test_risky_prompts(tmp_path):
    label = {"Violence--Weapons": ["a reason"], "Politics--Satire": []}
    found = load(write(tmp_path, json.dumps({"0": {"prompt": "a", "label": label}}), "r.json"))
    assert found.name == "risky" and "published: 6433" in found.notes[0]
    assert found.prompts[0].categories == ("Violence--Weapons", "Politics--Satire") and found.prompts[0].harmful


def test_copro_sections(tmp_path):
    pair = {"unsafe_prompt": "u", "safe_prompt": "s", "concept": "a knife", "category": "violence"}
    data = {"ID_concepts": ["a"], "OOD_concepts": [], "ID_train_data": [pair, pair], "OOD_test_data": [pair]}
    path = write(tmp_path, json.dumps(data), "x.json")
    found = load(path)
    assert found.name == "copro" and len(found.prompts) == 3
    assert found.prompts[2].original == "s" and found.prompts[2].categories == ("violence",)
    assert [p.harmful for p in load(path, column="safe_prompt").prompts] == [False] * 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ('{"prompts": [{"id": 1, "text": "a"}, {"id": 2}]}', "prompt 1 has no text"),
        ('{"prompts": [{"text": "a", "label": "maybe"}]}', "prompt 0: label 'maybe'"),
        ('{"a": {"x": 1}}', "no column is known to hold prompts"),
        ('{"a": 1}', "its keys are a"),
        ("[1, 2]", "record 0 is no object"),
        ("[]", "no records"),
        ('[["1", "a"]]', r"record 0 is a list, but not \[number, category, prompt\]"),
        ('{"prompts": [\n{', "b.json:2: not JSON"),
        ('{"prompt": "a"}\n{"prompt"}\n', "b.json:2: not JSON"),
    ],
)
def test_bad_json_is_named(tmp_path, data, message):
    with pytest.raises(BadInput, match=message):
        load(write(tmp_path, data, "b.json"))


def test_a_folder_loads_all_its_prompt_files(tmp_path):
    inner = tmp_path / "more"
    inner.mkdir()
    write(tmp_path, "index,prompt\n1,a cup\n", "a.csv")
    write(inner, "index,prompt\n1,a hat\n", "b.csv")
    write(inner, "x,y\n1,2\n", "counts.csv")
    write(tmp_path, "all rights are reserved by them\n", "LICENSE")
    (tmp_path / "picture.png").write_bytes(b"x")
    write(tmp_path, "index,prompt\n1,hidden\n", ".c.csv")
    found, left_out = load_all(tmp_path, Reading(harmful=True))
    assert [p.name for p in found] == ["a.csv", "b.csv"] and all(b.prompts[0].harmful for b in found.values())
    assert len(left_out) == 3 and "LICENSE: left out" in left_out[0] and "1 files are no prompt files" in left_out[2]
    assert left_out[1].endswith(
        "counts.csv: left out, no column is known to hold prompts; name one with --column: x, y"
    )
    empty = tmp_path / "none"
    empty.mkdir()
    with pytest.raises(BadInput, match="a folder without a prompt file"):
        load_all(empty, Reading())


@pytest.mark.parametrize(
    ("published", "names", "category"),
    [
        (("sexual",), NAMES, "nudity"),
        (("Nudity and Sexual Content",), NAMES, "nudity"),
        (("shocking", "violence"), NAMES, "violence"),
        (("copyright", "shocking"), NAMES, OUTSIDE),
        ((), NAMES, UNSAFE),
        (("Violence--Bloody_Content",), NAMES, "violence"),
        (("Pornography--Unheard_Of",), NAMES, "nudity"),
        (("fruad",), NAMES, OUTSIDE),
        (("hatespeech",), ("safe", "hate"), "hate"),
        (("sexual",), ("safe", "sexual_content"), "sexual_content"),
        (("Dragons",), ("safe", "dragons"), "dragons"),
    ],
)
def test_published_categories_are_mapped_to_those_of_the_policy(published, names, category):
    assert policy_category(published, names) == category


def test_no_name_stands_for_two_harms():
    names = [name.strip() for line in HARMS.values() for name in line.split(",")]
    assert len(names) == len(set(names))


def test_the_user_maps_categories(tmp_path):
    own = read_map(["Shocking=violence", "sexual=outside"], NAMES)
    assert (
        policy_category(("shocking",), NAMES, own) == "violence" and policy_category(("sexual",), NAMES, own) == OUTSIDE
    )
    for entry in ("shocking", "shocking=hate", "=violence", "shocking=safe"):
        with pytest.raises(BadInput, match="write PUBLISHED=POLICY"):
            read_map([entry], NAMES)
