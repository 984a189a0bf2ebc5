"""Why fine-tuned language models of paper 000 answer worse than in their training; ``fewheads language mismatch``.

- :mod:`export.experiments.mismatch.parts` trains adapters on a base in FP32 or NF4, and scores them under all
  conditions: on their own base or merged into that in FP32, begin tokens once or twice, teacher-forced and written
  freely; :mod:`export.experiments.mismatch.records` has what it keeps, and :mod:`export.experiments.mismatch.places`
  tells a second begin token from the places that it moves
- :mod:`export.experiments.mismatch.summary` makes :mod:`export.experiments.mismatch.results` and the verdict of them
- :mod:`export.experiments.mismatch.report` and :mod:`export.experiments.mismatch.plot` describe and draw the results
"""
