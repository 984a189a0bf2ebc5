"""Looped transformers that learn function classes in context: paper 003, after Garg et al. 2022 (arXiv 2208.01066).

- :mod:`export.papers.looped.functions` draws prompts: points and their values under a random function
- :mod:`export.papers.looped.seeds` keeps the prompts of trainings, evaluations and exports apart
- :mod:`export.papers.looped.baselines` has methods that learn each prompt from scratch
- :mod:`export.papers.looped.shifts` draws prompts that differ from those of the training
- :mod:`export.papers.looped.model` has the looped and the unlooped transformer
- :mod:`export.papers.looped.objective` has the truncated loss and its curricula
- :mod:`export.papers.looped.solvers` runs a model for many loops, stops early and accelerates
- :mod:`export.papers.looped.recipes` has the plans of trainings
- :mod:`export.papers.looped.reduce` makes the layers of a run smaller
- :mod:`export.papers.looped.bundle` and :mod:`export.papers.looped.tier` write bundles
"""

from __future__ import annotations

#: Models of ``fewheads train``, by the function class that they learn.
NAMES = ("looped-linear", "looped-sparse", "looped-tree", "looped-relu")
PREFIX = "looped-"
#: Name of the models in runs.
MODEL = "prompt-transformer"
