"""Looped transformers that learn function classes in context: paper 003, after Garg et al. 2022 (arXiv 2208.01066)."""

from __future__ import annotations

#: Models of ``fewheads train``, by the function class that they learn.
NAMES = ("looped-linear", "looped-sparse", "looped-tree", "looped-relu")
PREFIX = "looped-"
#: Name of the models in runs.
MODEL = "prompt-transformer"
