"""The attention of models that others exported, in the file for TensorRT."""

import numpy as np
import pytest
import torch

from export.convert import outputs_of
from export.estimate.model import kernels
from export.fewest_kernels import fewest_kernels
from export.pack.variants import Checks, _with_fewest_kernels
from export.precision import half
from tests.support.marks import with_rtx, with_transformers
from tests.support.onnx_graphs import packed
