"""Embeddings of runs, measured: similarity, retrieval, linear probes, and tiers mixed in one index."""

from __future__ import annotations

from typing import Literal

#: What an evaluation measures.
Group = Literal["sts", "retrieval", "probes", "mixed"]
GROUPS: tuple[Group, ...] = ("sts", "retrieval", "probes", "mixed")
#: Files of an evaluation.
RECORDS, REPORT = "records.jsonl", "report.md"
