"""Which tests need which package."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

with_rtx = pytest.mark.skipif(find_spec("tensorrt_rtx") is None, reason="needs tensorrt_rtx, which is x86-64 only")
