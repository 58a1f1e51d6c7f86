"""Write docs/results.md and docs/models.md, and the tables in docs/performance.md and README.md.

python bench/table.py
"""

from __future__ import annotations

from pathlib import Path

from formatting import ROOT
from models_page import models_page
from results_page import cost_table, headline_table, results_page

PAGES = {"docs/results.md": results_page, "docs/models.md": models_page}
TABLES = {"docs/performance.md": ("cost", cost_table), "README.md": ("headline", headline_table)}
"""Pages that are generated as a whole, and tables between marks in pages that people write."""


def with_table(text: str, mark: str, table: str) -> str:
    """Return the page with the table between its marks replaced; a page without marks stays as it is."""
    start, end = f"<!-- {mark}: written by bench/table.py -->\n", f"<!-- /{mark} -->"
    if start not in text:
        return text
    head, rest = text.split(start)
    return head + start + table + end + rest.split(end, 1)[1]


def pages() -> dict[Path, str]:
    """The current text of every page that holds generated tables."""
    written = {ROOT / name: make() for name, make in PAGES.items()}
    return written | {
        ROOT / name: with_table((ROOT / name).read_text(), mark, make()) for name, (mark, make) in TABLES.items()
    }


def main() -> None:
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
