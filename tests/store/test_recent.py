"""What is kept of the latest requests is bounded in number and in bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from guardpaint.store.recent import Recent


def test_the_oldest_make_room():
    kept = Recent(most=3, most_bytes=100)
    for name in "abcd":
        kept.put(name, name.upper(), 10)
    assert [kept.get(n) for n in "abcd"] == [None, "B", "C", "D"] and kept.bytes == 30
    kept.put("e", "E", 85)
    assert [kept.get(n) for n in "bcde"] == [None, None, "D", "E"] and kept.bytes == 95
    kept.put("f", "F", 1000)
    assert kept.get("f") == "F" and len(kept) == 1, "the newest stays, however large"
    kept.put("f", "G", 1)
    assert kept.get("f") == "G" and kept.bytes == 1


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 60)), max_size=40), st.integers(1, 5))
def test_never_more_than_allowed(puts, most):
    kept = Recent(most, 100)
    for name, size in puts:
        kept.put(name, name, size)
        assert len(kept) <= most and kept.get(name) == name
        assert kept.bytes == sum(size for _, size in kept.values.values())
        assert kept.bytes <= 100 or len(kept) == 1
