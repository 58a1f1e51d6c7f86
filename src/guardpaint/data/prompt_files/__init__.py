"""Reads published prompt sets, from files that the user provides, into one kind of record.

guardpaint eval prompts FILE [--format i2p] [--column adv_prompt] [--harmful | --benign]

No set is shipped. `containers` opens a file, `trees` finds the records of a JSON file, `columns` says which column of a
record holds what, `datasets` is the table of known sets, and `policies` maps published categories to a policy's.
Whether a prompt is harmful is said by its own record, by the user, or by the table; it is never guessed.
"""

from guardpaint.data.prompt_files.loading import FORMATS, Reading, load, load_all
from guardpaint.data.prompt_files.records import Benchmark, PublishedPrompt

__all__ = ["FORMATS", "Benchmark", "PublishedPrompt", "Reading", "load", "load_all"]
