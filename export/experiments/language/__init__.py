"""The experiment of paper 004: does backward attention improve a frozen language model? ``fewheads language compare``.

- :mod:`export.experiments.language.tasks` reads modules of the mathematics dataset as tasks
- :mod:`export.experiments.language.methods` has the head and what it is compared with
- :mod:`export.experiments.language.parts` trains and scores each of them, and keeps the result in a file of its own;
  :mod:`export.experiments.language.records` has its fields
- :mod:`export.experiments.language.summary` makes results and the verdict of the parts
- :mod:`export.experiments.language.changes` looks at what the head changes
- :mod:`export.experiments.language.report` and :mod:`export.experiments.language.plot` describe and draw the results
"""
