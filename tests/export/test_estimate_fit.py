"""The constants of the prediction, and its errors, are those of the fit to published measurements."""

import pytest

from export.estimate.document import README, compare, errors, fit, tables
from export.estimate.measurements import published
from export.estimate.roofline import ERRORS, FITTED


@pytest.fixture(scope="module")
def compared():
    return compare()


def test_the_constants_are_the_fit():
    assert fit([one for one in published().measurements if not one.check]) == FITTED


def test_the_errors_are_those_of_measurements_left_out(compared):
    assert errors(compared) == ERRORS
    for one in compared:
        if not one.measurement.check:
            assert one.prediction.low_ms < one.measurement.ms < one.prediction.high_ms, one.measurement


def test_the_document_has_every_measurement_with_its_prediction(compared):
    assert README.read_text().endswith(tables(compared)), "python -m export.estimate.document"


def test_each_source_and_network_is_used():
    found = published()
    assert {one.source for one in found.measurements} == set(found.sources)
    assert {one.network for one in found.measurements} == set(found.networks)
