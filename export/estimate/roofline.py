"""The prediction: a least time for each kernel, plus the longer of the products and the reads of the weights.

Fitted on published FP16 latencies of encoders at batch 1 on an Orin Nano, before and after Super: 0.2 ms for a layer at
625 MHz, and 45 % of the peak for its products. A transformer layer is ten kernels in an engine, so 0.02 ms for each.
For sequences of 50 patches the fit is 15 to 28 % too low. Most of that is the time to read the weights, which the
prediction takes where it is longer than that of the products.
"""

from __future__ import annotations

import msgspec

from export.estimate.devices import Mode
from export.estimate.operations import Work

#: Milliseconds of a kernel with little work, at :data:`_KERNEL_MHZ`.
KERNEL_MS = 0.02
KERNELS_OF_A_LAYER = 10
_KERNEL_MHZ = 625.0
#: The share of the peak that products reach.
EFFICIENCY = 0.45
#: Products with weights in a transformer layer.
_PRODUCTS_OF_A_LAYER = 6
#: Expected distance of a measurement from a prediction, as a share of it.
BAND = 0.40
BIAS = (
    "On the eleven published figures that it was fitted to, encoders in FP16 at batch 1, the prediction is 11 % too "
    "low to 5 % too high, and too low for short sequences. INT8 and larger batches were in none of them."
)


class Prediction(msgspec.Struct, frozen=True):
    """A predicted latency, and its parts.

    Attributes:
        milliseconds: of one run on the GPU, without server and network: ``launch_ms`` and the longer of the other two.
        launch_ms: the least time of all kernels.
        memory_ms: of reading the weights.
        gflop: 10⁹ operations, all precisions together.
    """

    milliseconds: float
    low_ms: float
    high_ms: float
    launch_ms: float
    compute_ms: float
    memory_ms: float
    gflop: float
    kernels: int


def predict(work: Work, kernels: int, mode: Mode) -> Prediction:
    """Predict the latency of a run."""
    launch = kernels * KERNEL_MS * _KERNEL_MHZ / mode.gpu_mhz
    compute = sum(gflop / (EFFICIENCY * mode.tflops(precision)) for precision, gflop in work.gflop.items())
    memory = 1e-6 * work.weight_bytes / mode.gb_per_s
    total = launch + max(compute, memory)
    low, high = (1 - BAND) * total, (1 + BAND) * total
    return Prediction(total, low, high, launch, compute, memory, sum(work.gflop.values()), kernels)


def usual_kernels(work: Work) -> int:
    """Return the kernels of the fit, ten for a transformer layer, for a graph whose engine cannot be listed."""
    layers = max(work.attention, -(-work.products // _PRODUCTS_OF_A_LAYER))
    return KERNELS_OF_A_LAYER * layers
