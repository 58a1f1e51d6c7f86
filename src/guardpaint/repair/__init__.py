"""Repair: who proposes local repairs, with which knobs."""
