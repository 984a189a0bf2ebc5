"""Training: one loop for every model; an objective owns the data, the loss and the score.

- :mod:`export.training.objective` is the interface that calculators, tasks and function classes implement
- :mod:`export.training.trainer` has the loop: optimiser, schedule, clipping, early stopping, resume
- :mod:`export.training.recipe` has its settings
- :mod:`export.training.objective` receives its steps and epochs; :mod:`export.training.watch` shows them
- :mod:`export.training.log` writes ``log.jsonl`` and, if wanted, TensorBoard's events
"""
