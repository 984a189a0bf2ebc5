"""The accuracy of tiers, by the measures of a manifest."""

from __future__ import annotations

from edge.bundles.manifest import Measure
from edge.scheduling.tier_selection import accuracies, is_as_accurate


def test_measures_are_of_the_tier_and_runtime_that_their_splits_name() -> None:
    splits = {
        "dev, tier x1": 0.9,
        "dev, tier x1-int8 on onnxruntime": 0.8,
        "dev, tier x1-int8 on tensorrt": 0.7,
        "dev, tier other": 0.6,
        "dev": 0.5,
        "golden inputs: random, tier x1-int8, int8 for onnxruntime, output y": 0.4,
    }
    measures = [Measure("accuracy", split, value, 9) for split, value in splits.items()]
    measures += [
        Measure("accuracy, difference to FP32", "dev, tier x1-int8 on onnxruntime", -0.1, 9),
        Measure("rmse", "dev, tier x1", 3.0, 9),  # of which less is better
        Measure("f1", "test, all of it, tier x1", 0.3, 7),
    ]
    key = ("accuracy", "dev", 9)
    for runtime, value in (("onnxruntime", 0.8), ("tensorrt", 0.7), ("any", None)):
        assert accuracies(measures, {"x1": "any", "x1-int8": runtime, "x2": "any"}) == {
            "x1": {key: 0.9, ("f1", "test, all of it", 7): 0.3},
            "x1-int8": {key: value} if value else {},
            "x2": {},
        }


def test_a_tier_is_as_accurate_only_by_all_measures_that_both_have() -> None:
    dev, test, fewer = ("f1", "dev", 9), ("f1", "test", 9), ("f1", "dev", 8)
    assert is_as_accurate({dev: 0.8, test: 0.1}, {dev: 0.8})
    assert not is_as_accurate({dev: 0.8, test: 0.1}, {dev: 0.7, test: 0.2})
    assert not is_as_accurate({dev: 0.8}, {fewer: 0.7})
    assert not is_as_accurate({}, {})
