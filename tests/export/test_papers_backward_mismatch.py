"""The losses of fine-tuned models between their training and their use."""

from typing import get_args

import numpy as np
import pytest

from export.generate.model import BaseIdentity
from export.papers.backward.mismatch import BASES, SWITCHES, AdapterRecord, Begin, Mismatch, MismatchSettings, Scores
from export.training.provenance import processor


def make_record(seed, accuracy):
    """Return a record; ``accuracy`` gives the share of right answers from split, merged and begin."""
    generator = np.random.default_rng(seed)
    scores = []
    for split in ("training", "test"):
        for merged in (False, True):
            for begin in get_args(Begin):
                right = generator.permutation(200) < round(200 * accuracy(split, merged, begin))
                scores.append(
                    Scores(
                        split=split, merged=merged, begin=begin, tokens=(4,) * 200,
                        hits=tuple(4 if one else 3 for one in right),
                        written=tuple(map(bool, right)), answered=tuple(map(bool, right)),
                    )
                )  # fmt: skip
    return AdapterRecord(parameters=1, best_epoch=1, scores=tuple(scores))


def experiment_of(seeds):
    base = BaseIdentity("toy", "0" * 64)
    values = {"data": {"train": "", "test": ""}, "begin": (0,), "rank": 1, "epochs": 1, "rate": 1e-3}
    return Mismatch(MismatchSettings(base=base, **values, seeds=seeds, processor=processor()))


@pytest.mark.parametrize(
    ("accuracy", "switch"),
    [
        (lambda split, merged, begin: 1.0 - 0.5 * merged, "merged into the FP32 base"),
        (lambda split, merged, begin: 1.0 - 0.5 * (begin == "twice, places kept"), "begin token twice, places kept"),
        (lambda split, merged, begin: 1.0 - 0.5 * (begin == "twice"), "begin token twice"),
        (lambda split, merged, begin: 0.5, "whole completions, not tokens"),
    ],
)
def test_each_switch_has_its_change(accuracy, switch):
    experiment = experiment_of(seeds=3)
    records = {part.name: make_record(part.arguments[1], accuracy) for part in experiment.parts()}
    assert experiment.text(records).startswith(f"Teacher forcing and free writing agree on {6 * 2 * 6 * 200:,} of")
    effects, _ = experiment.tables(records)
    assert len(effects.rows) == len(BASES) * len(SWITCHES)
    changes = {row[1]: row[3] for row in effects.rows if row[0] == "NF4"}
    expected = -37.5 if switch.startswith("whole") else -50.0  # of the tokens, three of four are right in wrong ones
    assert changes[switch].startswith(f"{expected:+.1f} (")
    lost = {name for name, change in changes.items() if not change.startswith(("+0.0", "-0.0"))}
    assert lost - {"merged, and begin token twice"} == {switch}


def test_a_report_has_no_base_without_a_record():
    experiment = experiment_of(seeds=1)
    effects, every = experiment.tables({"fp32-seed0": make_record(0, lambda *_: 0.5)})
    assert {row[0] for row in (*effects.rows, *every.rows)} == {"FP32"}
