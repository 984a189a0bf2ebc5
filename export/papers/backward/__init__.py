"""Papers 004 and 000: heads of backward attention, and the losses of fine-tuned language models in use.

- :mod:`export.papers.backward.head` and :mod:`export.papers.backward.training` have the head, its controls and their
  training; :mod:`export.papers.backward.bundle` exports a head
- :mod:`export.papers.backward.run`, :mod:`export.papers.backward.chunks`, :mod:`export.papers.backward.calculators` and
  :mod:`export.papers.backward.mismatch` are experiments of :mod:`export.papers.experiment`;
  :mod:`export.papers.backward.tables` makes the published tables again
- :mod:`export.cli.language` has the commands
"""
