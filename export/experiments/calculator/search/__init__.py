"""Bayesian search for the shape and the learning rate of a calculator; ``fewheads calculator search``.

- :mod:`export.papers.calculator.search.space` has what is searched, by network, and paper 000's budgets
- :mod:`export.papers.calculator.search.study` runs the trials, by Optuna, and resumes
- :mod:`export.papers.calculator.search.plot` draws them
"""
