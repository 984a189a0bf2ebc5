"""The comparison of calculators: accuracy, the benchmark's scores, and cost; ``fewheads calculator compare``.

- :mod:`export.experiments.calculator.comparison.cost` exports bundles, and measures their latency with ``fewheads
  bench`` and their memory with :mod:`export.experiments.calculator.comparison.memory`, in processes of their own
- :mod:`export.experiments.calculator.comparison.summary` makes the
  :mod:`export.experiments.calculator.comparison.results` from the answers of runs
- :mod:`export.experiments.calculator.comparison.report` and :mod:`export.experiments.calculator.comparison.plot`
  describe and draw the results
"""
