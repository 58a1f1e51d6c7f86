"""Corpora for the auditor: sources, captions, labels, de-duplication, splits, cards, views of unfinished images."""
