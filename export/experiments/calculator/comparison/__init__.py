"""The comparison of calculators: accuracy, the benchmark's scores, and cost; ``fewheads calculator compare``.

- :mod:`export.papers.calculator.comparison.cost` exports bundles, and measures their latency with ``fewheads
  bench`` and their memory with :mod:`export.papers.calculator.comparison.memory`, in processes of their own
- :mod:`export.papers.calculator.comparison.summary` makes the
  :mod:`export.papers.calculator.comparison.results` from the answers of runs
- :mod:`export.papers.calculator.comparison.report` and :mod:`export.papers.calculator.comparison.plot`
  describe and draw the results
"""
