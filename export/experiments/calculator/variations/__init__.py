"""One network of the calculators trained in other ways; ``fewheads calculator vary`` and ``benchmark-loss``.

- :mod:`export.papers.calculator.variations.grid` lists the variants, without torch
- :mod:`export.papers.calculator.variations.parts` trains each with each seed, and keeps what it measured
- :mod:`export.papers.calculator.variations.results` makes rows of them and finds the choice on validation
- :mod:`export.papers.calculator.variations.report` and :mod:`export.papers.calculator.variations.plot`
  describe and draw the rows
"""
