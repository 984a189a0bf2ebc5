"""One network of the calculators trained in other ways; ``fewheads calculator vary`` and ``benchmark-loss``.

- :mod:`export.experiments.calculator.variations.grid` lists the variants, without torch
- :mod:`export.experiments.calculator.variations.parts` trains each with each seed, and keeps what it measured
- :mod:`export.experiments.calculator.variations.results` makes rows of them and finds the choice on validation
- :mod:`export.experiments.calculator.variations.report` and :mod:`export.experiments.calculator.variations.plot`
  describe and draw the rows
"""
