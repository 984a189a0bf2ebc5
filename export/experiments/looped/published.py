"""Errors of paper 003's models and baselines in 20 dimensions, by number of pairs, from its public code's notebooks.

Squared errors over the normaliser of the function class. Those of trees are read off the paper's figure.
"""

from __future__ import annotations

#: Dimensions of the published models.
DIMS = 20

_LINEAR = (1, 5, 10, 15, 19, 20, 21, 25, 30, 40)
_SPARSE = (1, 5, 10, 15, 20, 25, 30, 40)
_RELU = (10, 20, 40, 60, 80, 100)
_TREE = (20, 40, 60, 100)


def _curve(pairs: tuple[int, ...], *errors: float) -> dict[int, float]:
    return dict(zip(pairs, errors, strict=True))


#: By function class and method: the error after so many pairs.
PUBLISHED: dict[str, dict[str, dict[int, float]]] = {
    "linear": {
        "unlooped": _curve(_LINEAR, 0.920, 0.769, 0.519, 0.247, 0.0592, 0.0204, 0.0077, 0.00135, 7.4e-4, 4.8e-4),
        "looped": _curve(_LINEAR, 0.921, 0.771, 0.519, 0.248, 0.0596, 0.0242, 0.0110, 0.00231, 0.00114, 7.8e-4),
        "least squares": _curve(_LINEAR, 0.916, 0.765, 0.515, 0.248, 0.0480, 1.5e-9, 2e-12, 2e-13, 1e-13, 1e-13),
        "3-NN": _curve(_LINEAR, 1.96, 1.22, 0.904, 0.812, 0.796, 0.769, 0.800, 0.795, 0.733, 0.710),
        "averaging": _curve(_LINEAR, 22.2, 4.63, 2.04, 1.58, 1.08, 1.13, 1.09, 0.789, 0.658, 0.525),
    },
    "sparse": {
        "unlooped": _curve(_SPARSE, 0.887, 0.584, 0.0848, 0.0153, 0.0048, 0.0026, 0.0021, 0.0017),
        "looped": _curve(_SPARSE, 0.897, 0.599, 0.0213, 0.0037, 0.00133, 0.00102, 6.7e-4, 6.1e-4),
        "Lasso 0.01": _curve(_SPARSE, 1.11, 0.645, 0.0498, 0.0023, 2.3e-4, 1.6e-4, 1.5e-4, 1.3e-4),
        "least squares": _curve(_SPARSE[:6], 0.893, 0.860, 0.457, 0.258, 1e-9, 2e-13),
    },
    "tree": {
        "unlooped": _curve(_TREE, 0.75, 0.40, 0.17, 0.07),
        "looped": _curve(_TREE, 0.70, 0.33, 0.12, 0.03),
        "XGBoost, signs": _curve(_TREE, 1.1, 0.75, 0.55, 0.33),
        "greedy tree, signs": _curve(_TREE, 1.6, 1.1, 0.9, 0.50),
        "3-NN": {100: 1.07},
        "greedy tree": {100: 0.87},
        "XGBoost": {100: 0.68},
    },
    "relu": {
        "unlooped": _curve(_RELU, 0.521, 0.411, 0.280, 0.208, 0.183, 0.170),
        "looped": _curve(_RELU, 0.523, 0.414, 0.282, 0.216, 0.189, 0.180),
        "two-layer network": {100: 0.18},
        "3-NN": {100: 0.47},
        "least squares": {100: 0.58},
    },
}
