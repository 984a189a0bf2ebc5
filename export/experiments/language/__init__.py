"""The experiment of paper 004: does backward attention improve a frozen language model? ``fewheads language compare``.

- :mod:`export.papers.backward.compare.tasks` reads modules of the mathematics dataset as tasks
- :mod:`export.papers.backward.compare.methods` has the head and what it is compared with
- :mod:`export.papers.backward.compare.parts` trains and scores each of them, and keeps the result in a file of its own;
  :mod:`export.papers.backward.compare.records` has its fields
- :mod:`export.papers.backward.compare.summary` makes results and the verdict of the parts
- :mod:`export.papers.backward.compare.changes` looks at what the head changes
- :mod:`export.papers.backward.compare.report` and :mod:`export.papers.backward.compare.plot` describe and draw the results
"""
