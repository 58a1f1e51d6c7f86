"""The row store: append-only, mends what a crash cut short, names every other bad line."""

from __future__ import annotations

import pytest

from guardpaint.errors import BadInput
from guardpaint.store.rows import append_rows, read_rows


def test_rows_come_back_in_order(tmp_path):
    path = tmp_path / "new" / "a.jsonl"
    assert read_rows(path) == []
    append_rows(path, [{"a": 1}, {"b": "größer"}])
    append_rows(path, [{"c": None}])
    assert read_rows(path) == [{"a": 1}, {"b": "größer"}, {"c": None}]
    assert "größer" in path.read_text(encoding="utf-8"), "text stays readable"


@pytest.mark.parametrize("cut", [b'{"b": 2', b'{"b": "\xc3', b"{"])
def test_a_half_written_last_line_is_dropped(tmp_path, cut):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + cut)
    assert read_rows(path) == [{"a": 1}]
    append_rows(path, [{"c": 3}])
    assert read_rows(path) == [{"a": 1}, {"c": 3}] and path.read_bytes() == b'{"a": 1}\n{"c": 3}\n'


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": 2}')
    append_rows(path, [{"c": 3}])
    assert read_rows(path) == [{"a": 1}, {"b": 2}, {"c": 3}]


def test_a_long_last_line_is_found_whole(tmp_path):
    """Longer than one read from the end of the file."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": "' + b"x" * 200_000)
    append_rows(path, [{"c": "y" * 200_000}])
    assert [list(r) for r in read_rows(path)] == [["a"], ["c"]]


@pytest.mark.parametrize(("line", "message"), [(b"nonsense", "a.jsonl:2: not JSON"), (b"[1]", "a.jsonl:2: not a JSON")])
def test_any_other_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b'\n{"c": 3}\n')
    with pytest.raises(BadInput, match=message):
        read_rows(path)
