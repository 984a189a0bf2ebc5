"""The double of TensorRT as another version than the one that is installed as ``tensorrt``."""

import os
import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from unittest.mock import patch

_DIRECTORY = Path(__file__).parent / "tensorrt"


@cache
def double(version):
    """Import the double as a version. Its submodules are attributes of it."""
    name = f"tensorrt_{version.replace('.', '_')}"
    spec = spec_from_file_location(name, _DIRECTORY / "__init__.py", submodule_search_locations=[str(_DIRECTORY)])
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        with patch.dict(os.environ, SOFTWARE_TENSORRT_VERSION=version):
            spec.loader.exec_module(module)
    finally:
        for part in [part for part in sys.modules if part.partition(".")[0] == name]:
            del sys.modules[part]
    return module
