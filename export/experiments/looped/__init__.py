"""The experiments of paper 003, "Looped Transformers are Better at Learning Learning Algorithms": ``fewheads looped``.

- :mod:`export.papers.looped.runs` opens trained runs and groups those that differ in their seed
- :mod:`export.papers.looped.parts` computes the parts of the experiments, each kept in a file of its own
- :mod:`export.papers.looped.probe` and :mod:`export.papers.looped.paths` have what a part measures
- :mod:`export.papers.looped.sample` resamples prompts and runs, and :mod:`export.papers.looped.summary` makes
  results of the parts
- :mod:`export.papers.looped.plot` and :mod:`export.papers.looped.report` draw and describe the results
- :mod:`export.papers.looped.precisions` measures sizes and precisions of the layer side by side
"""
