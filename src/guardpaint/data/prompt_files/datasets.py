"""The table of known sets: what each one is, and how its published file is recognised.

A set whose columns no other set has is recognised by them; any other by the name of its file (or the name that the file
gives itself) and its columns. Columns that many sets share, such as `case_number`, `class` or `image_id`, say nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from guardpaint.data.prompt_files.columns import find, text_of
from guardpaint.data.prompt_files.records import Records


@dataclass(frozen=True)
class Dataset:
    """A published set."""

    name: str
    harmful: bool
    """What the set is; a record's own label goes before it."""
    needs: tuple[str, ...] = ("prompt",)
    """Columns that its files have."""
    files: str = ""
    """Pattern of the whole name of the file, without suffix; empty if the columns tell."""
    folder: str = ""
    """Name of a folder above the file, where the file's own name says too little."""
    layouts: tuple[str, ...] = ()
    """Layouts of its files; empty: any."""
    mark: str = ""
    """What the column `source` begins with in every record."""
    prompt: str | None = None
    """The column of the prompt, if it is not the first one known."""
    others: Mapping[str, bool] = field(default_factory=dict)
    """Other columns of prompts, and whether they are harmful."""
    category: str = ""
    """The harm of the whole set, if it is about one. `{}` stands for what `files` captures."""
    groups: bool = False
    """Whether its `class` column groups objects and names no harm."""
    labelled: bool = False
    """Whether 1 and 0 in its label column mean harmful and benign."""
    counts: tuple[int, ...] = ()
    """Published numbers of records; empty: not checked."""
    widths: tuple[int, ...] = ()
    """Published numbers of columns; empty: not checked."""

    def fits(self, path: Path, stem: str, records: Records) -> bool:
        """Whether a file is this set."""
        names = [n for n in (stem, records.declared) if n]
        return (
            all(find(records.columns, (c,)) for c in self.needs)
            and (not self.layouts or records.layout in self.layouts)
            and (not self.files or any(re.fullmatch(self.files, n, re.IGNORECASE) for n in names))
            and (not self.folder or self.folder in path.resolve().parts)
            and (not self.mark or all(text_of(r, "source").lower().startswith(self.mark) for _, r in records.rows))
        )

    def harm(self, stem: str) -> str:
        """The harm of a whole file of this set, or an empty text."""
        match = re.fullmatch(self.files, stem, re.IGNORECASE) if self.files else None
        caught = match.group(1).lower() if match and match.groups() else ""
        return self.category.replace("{}", caught)


SCORED = ("prompt", "categories", "inappropriate_percentage", "q16_percentage", "prompt_toxicity")
SEEDED = ("prompt", "case_number", "evaluation_seed")
LINES = ("lines", "numbered-lines")
HARMS = "abuse|copyright|discrimination|harassment|hate|illegal|nudity|physical_harm|sexual|shocking|violence"
DATASETS = (
    Dataset("i2p", True, SCORED, counts=(4703, 142), widths=(14, 16)),
    Dataset("i2p", True, ("prompt", "translate_prompt", "class")),
    Dataset("i2p", True, files=r"i2p([-_](benchmark|filtered|with_id|formatted|translate))?|unsafe-prompts4703"),
    Dataset("i2p", True, ("text",), files=r"i2p([-_](filtered|formatted|translate|harmful|labeled|limited))*"),
    Dataset("i2p", True, files="batch_input", folder="JailbreakDiffusionBench", layouts=("chat-requests",)),
    Dataset(
        "mma", True, ("target_prompt", "adv_prompt", "sanitized_adv_prompt"), category="nudity", counts=(1000,),
        others={"target_prompt": True, "sanitized_adv_prompt": True, "clean_prompt": False},
    ),
    Dataset(
        "ring-a-bell", True, ("sensitive prompt", "normal prompt"), others={"normal prompt": False},
        files=r"(?:.*(nudity|violence).*)", category="{}",
    ),
    Dataset("ring-a-bell", True, ("sensitive prompt", "normal prompt"), others={"normal prompt": False}),
    Dataset("ring-a-bell", True, SEEDED, files=r"(nudity|violence)_eta_[\d.]+_k_\d+.*", category="{}"),
    Dataset(
        "ring-a-bell", True, (*SEEDED, "prompt1"), files=r"(nudity|violence)_\d+", category="{}",
        others={"prompt1": False},
    ),
    Dataset("ring-a-bell-plain", False, SEEDED, files=r"no(nudity|violence)_prompts?"),
    Dataset("coco", False, ("prompt", "source"), mark="coco", counts=(30_000, 9_969, 10_000, 91)),
    Dataset("coco", False, (*SEEDED, "coco_id"), counts=(30_000, 10_000)),
    Dataset("coco", False, ("text", "image_id"), files=r"(ms)?coco[-_]?(20\d\d)?[-_]?(val)?[-_]?(\d+k)?"),
    Dataset("coco", False, ("caption", "image_id"), files=r"(ms)?coco[-_]?(20\d\d)?[-_]?(val)?[-_]?(\d+k|captions)?"),
    Dataset("objects", False, SEEDED, files="church|garbage_truck|parachute|tench", groups=True),
    Dataset("artists", False, SEEDED, files=r"van_?gogh(_.*)?|((big|short|niche)_)+art(ist)?_prompts", groups=True),
    Dataset("imagenet", False, (*SEEDED, "label_idx", "label_str"), groups=True),
    Dataset("imagenet", False, (*SEEDED, "class"), files=r"imagenet(te)?(_prompts)?", groups=True),
    Dataset("professions", False, (*SEEDED, "profession"), files=r"professions?\d*(_prompts)?", groups=True),
    Dataset("partiprompts", False, ("prompt", "category", "challenge"), counts=(1632,), groups=True),
    Dataset("pragmatic", True, ("image_prompt", "class", "subclass"), prompt="image_prompt", labelled=True),
    Dataset("pragmatic", True, ("image_prompt", "text_prompt"), prompt="image_prompt", labelled=True),
    Dataset("copro", True, ("unsafe_prompt", "safe_prompt"), others={"safe_prompt": False}),
    Dataset("risky", True, ("prompt", "label"), layouts=("keyed",), counts=(6433,)),
    Dataset("t2v", True, layouts=("triples",), files=r"t2v(safetybench)?", counts=(296,)),
    Dataset("jbdb-attack", True, ("prompt_index", "original_prompt", "attack_prompt")),
    Dataset("vbcde", True, files=r"vbcde[-_]?\d*", layouts=LINES, counts=(100,)),
    Dataset("vbcde", True, ("text",), files=r"vbcde([-_]\w+)?", layouts=("jbdb", "records", "label-studio")),
    Dataset("sneakyprompt", True, files=r"nsfw_\d+|sneakyprompt([-_]nsfw)?([-_]\d+)?", layouts=LINES, counts=(200,)),
    Dataset("sneakyprompt-animals", False, files="animal_prompts?", layouts=LINES, counts=(100,)),
    Dataset("jbdb-lines", True, files=rf"({HARMS})[-_]\d+", layouts=("numbered-lines",), category="{}"),
)  # fmt: skip
"""Known sets; the first that fits counts."""


def recognised(path: Path, stem: str, records: Records) -> Dataset | None:
    """The first known set that a file is."""
    return next((d for d in DATASETS if d.fits(path, stem, records)), None)


def named(name: str, records: Records) -> Dataset | None:
    """The set of that name whose columns fit best: the first whose columns are all there, else the first one."""
    same = [d for d in DATASETS if d.name == name]
    return next((d for d in same if all(find(records.columns, (c,)) for c in d.needs)), same[0] if same else None)
