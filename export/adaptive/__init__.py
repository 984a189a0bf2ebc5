"""Paper 002's scorers on real encoders: heads in calibrated order, a score for each, and a loss that reduces them.

- :mod:`export.papers.adaptive.scores` orders the coordinates of each head, so that the first d' are worth keeping
- :mod:`export.papers.adaptive.scores` puts scores on every layer: from a scorer, learnt for all inputs alike, or given
- :mod:`export.papers.adaptive.term` has the third loss, beside the paper's and its repair: a budget of measured time
- :mod:`export.papers.adaptive.term` trains them within :class:`export.finetune.finetune.TaskObjective`
- :mod:`export.papers.adaptive.scores` makes the matrices themselves smaller where the scores are the same for every input
"""
