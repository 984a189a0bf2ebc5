"""The experiments of paper 003, "Looped Transformers are Better at Learning Learning Algorithms": ``fewheads looped``.

- :mod:`export.experiments.looped.runs` opens trained runs and groups those that differ in their seed
- :mod:`export.experiments.looped.parts` computes the parts of the experiments, each kept in a file of its own
- :mod:`export.experiments.looped.probe` and :mod:`export.experiments.looped.paths` have what a part measures
- :mod:`export.experiments.looped.sample` resamples prompts and runs, and :mod:`export.experiments.looped.summary` makes
  results of the parts
- :mod:`export.experiments.looped.plot` and :mod:`export.experiments.looped.report` draw and describe the results
- :mod:`export.experiments.looped.precisions` measures sizes and precisions of the layer side by side
"""
