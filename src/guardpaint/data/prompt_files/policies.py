"""The table that maps published categories to those of a policy.

Published sets name harms in some sixty spellings, policies in others. Both are looked up here: a published category
belongs to the policy's category that stands in the same line. What stands in no line of the policy is outside of it:
such prompts are harmful, but the policy does not promise anything about them, so they are counted apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from guardpaint.errors import BadInput
from guardpaint.types import SAFE

OUTSIDE = "outside"
"""Category of a harmful prompt whose harm the policy does not cover."""
UNSAFE = "unsafe"
"""Category of a harmful prompt whose file does not say which harm it asks for."""
HARMS: Mapping[str, str] = {
    "nudity": (
        "nudity, sexual, sex, sexual content, sexually explicit, nudity and sexual content, porn, pornography, erotic, "
        "explicit pornography, borderline pornography, nsfw, adult content"
    ),
    "violence": (
        "violence, violent, gore, blood, bloody content, weapons and conflicts, physical harm, physicalharm, "
        "physical harm and violence, torture, shootings"
    ),
    "self-harm": "self-harm, self harm, selfharm, suicide",
    "hate": "hate, hate content, hatespeech, hate speech, racism, discrimination, discrimination and disinformation",
    "harassment": "harassment, bullying, abuse, abusiveness",
    "shocking": "shocking, disturbing, disturbing content, terrifying content, other disturbing content",
    "illegal activity": (
        "illegal activity, illegal activities, illegal activitiy, illegal, crime, drug crimes, drugs, illegal trade, "
        "theft and robbery, other illegal content"
    ),
    "fraud": "fraud, fruad, scam, deception",
    "terror": "terror, terrorism",
    "politics": (
        "politics, political, political lobbying, political sensitivity, political figures, political metaphor, "
        "misinformation, disinformation"
    ),
    "copyright": "copyright, copyright infringement, cartoon characters, logo, intellectual property",
    "animal abuse": "animal abuse, animal cruelty",
}
"""Harms, each with the names under which sets and policies know it."""
CONCEPTS = {name.strip(): harm for harm, names in HARMS.items() for name in names.split(",")}


def plain(name: str) -> str:
    """A name in lower case, with spaces for underscores."""
    return re.sub(r"[\s_]+", " ", name).strip().lower()


def concept(name: str) -> str:
    """The harm that a name stands for, or the name itself. Of `Primary--Sub` the finer name goes first."""
    for part in (*reversed(name.split("--")), name):
        if plain(part) in CONCEPTS:
            return CONCEPTS[plain(part)]
    return plain(name)


def read_map(entries: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Entries PUBLISHED=POLICY of a user as a dictionary; POLICY is a category of the policy, or `outside`."""
    found = {}
    for entry in entries:
        published, mark, category = entry.rpartition("=")
        if not mark or not published.strip() or category not in (*names[1:], OUTSIDE):
            allowed = ", ".join((*names[1:], OUTSIDE))
            raise BadInput(
                f"map {entry!r}: write PUBLISHED=POLICY, as in sexual={names[-1]}; POLICY is one of {allowed}"
            )
        found[plain(published)] = category
    return found


def policy_category(published: Sequence[str], names: Sequence[str], own: Mapping[str, str] | None = None) -> str:
    """The policy's category of a harmful prompt with these published ones: the first of the policy that any belongs to.

    `outside` if none does, `unsafe` if the set names none. `own` holds the user's entries, which go first.
    """
    if not published:
        return UNSAFE
    found = {(own or {}).get(plain(p)) or by_table(p, names) for p in published}
    return next((name for name in names if name != SAFE and name in found), OUTSIDE)


def by_table(published: str, names: Sequence[str]) -> str:
    """The policy's category in the same line of the table as a published one, or `outside`."""
    return next((n for n in names if n != SAFE and concept(n) == concept(published)), OUTSIDE)
