"""Why fine-tuned language models of paper 000 answer worse than in their training; ``fewheads language mismatch``.

- :mod:`export.papers.backward.mismatch.parts` trains adapters on a base in FP32 or NF4, and scores them under all
  conditions: on their own base or merged into that in FP32, begin tokens once or twice, teacher-forced and written
  freely; :mod:`export.papers.backward.mismatch.records` has what it keeps, and :mod:`export.papers.backward.mismatch.places`
  tells a second begin token from the places that it moves
- :mod:`export.papers.backward.mismatch.summary` makes :mod:`export.papers.backward.mismatch.results` and the verdict of them
- :mod:`export.papers.backward.mismatch.report` and :mod:`export.papers.backward.mismatch.plot` describe and draw the results
"""
