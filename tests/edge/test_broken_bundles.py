"""The corpus of broken bundles: each gives exactly the error that ``expected.json`` states, and none is served."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from edge import errors
from edge.bundles.bundle import Bundle
from edge.bundles.preprocess import preprocessor
from edge.runtimes.build import load_runner
from tests.data import make_broken_bundles
from tests.data.make_broken_bundles import BROKEN_BUNDLES

EXPECTED = json.loads((BROKEN_BUNDLES / "expected.json").read_text())


@pytest.mark.parametrize("models", [True, False], ids=["read whole", "models when needed"])
@pytest.mark.parametrize("case", sorted(EXPECTED))
def test_broken_bundle_gives_its_error(case: str, models: bool, tmp_path: Path):
    expected = EXPECTED[case]
    with pytest.raises(errors.FewheadsError) as caught:
        _load(BROKEN_BUNDLES / case, tmp_path, models)
    assert type(caught.value) is getattr(errors, expected["error"])
    for fragment in expected["fragments"]:
        assert fragment in str(caught.value)
    # The four parts: what, given, expected, and the way out.
    assert str(BROKEN_BUNDLES / case) in caught.value.subject
    assert caught.value.fix.endswith(".")


def test_generator_gives_the_same_tree(tmp_path: Path):
    make_broken_bundles.write(tmp_path)
    committed = _tree(BROKEN_BUNDLES)
    del committed["expected.json"]
    assert _tree(tmp_path) == committed


def test_every_case_has_an_expectation():
    assert set(make_broken_bundles.cases()) == set(EXPECTED)


def _load(path: Path, cache: Path, models: bool) -> None:
    """Do with a bundle what a server does before it serves it."""
    bundle = Bundle.open(path, models=models)
    preprocessor(bundle)
    load_runner(bundle, "onnxruntime", cache)


def _tree(directory: Path) -> dict[str, bytes | str]:
    """Return contents of files, and targets of links, by path."""
    paths = [path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir()]
    return {
        str(path.relative_to(directory)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in paths
    }
