"""The prediction of a latency: for each kernel a fixed time, and the longer of its operations and its bytes.

The constants are fitted to published latencies of TensorRT on the Orin Nano by ``export/estimate/document.py``.
README.md beside this file has every measurement with its prediction, and the errors of models left out of the fit.

- A kernel has a fixed time, which grows as the GPU's clock falls.
- A product reaches a share of its precision's peak, and computes rows in tiles of 64. In INT8, products of matrices
  reach a smaller share, convolutions do not. Attention reaches a share of the FP16 peak.
- Weights and activations come at a share of the memory's peak. Kernels run one after the other, in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from export.estimate.devices import Mode
from export.estimate.work import Kernel, Work

BoundBy = Literal["kernels", "products", "memory"]
#: What binds a run in FP16; and runs in INT8, of several rows, and narrower than what the constants are fitted to.
Regime = Literal["kernels", "products", "memory", "int8", "batch", "narrow"]


class Constants(msgspec.Struct, frozen=True):
    """What is fitted.

    Attributes:
        product_ms: fixed time of a product or attention at 1,020 MHz.
        other_ms: fixed time of any other kernel.
        product: share of the peak of a product with full tiles.
        int8: of that share, what a product of matrices in INT8 reaches.
        attention: share of the FP16 peak.
        memory: share of the memory's peak bandwidth.
    """

    product_ms: float
    other_ms: float
    product: float
    int8: float
    attention: float
    memory: float


#: The result of the fit.
FITTED = Constants(product_ms=0.00902, other_ms=0.00446, product=0.615, int8=0.663, attention=0.0988, memory=0.836)
_CLOCK_MHZ = 1020.0


class Errors(msgspec.Struct, frozen=True):
    """Errors of predictions of published measurements, as shares of these, in one regime.

    Attributes:
        count: of measurements.
        rms: their root mean square, each by a fit without its network.
        largest: the largest, whatever its sign.
    """

    count: int
    rms: float
    largest: float

    @property
    def band(self) -> float:
        """Twice the root mean square; of fewer than four measurements the largest error."""
        return 2 * self.rms if self.count >= 4 else self.largest


#: By regime: a result of the fit, too.
ERRORS: dict[Regime, Errors] = {
    "kernels": Errors(3, 0.34, 0.586),
    "products": Errors(23, 0.109, 0.27),
    "memory": Errors(14, 0.152, 0.242),
    "int8": Errors(6, 0.137, 0.226),
    "batch": Errors(4, 0.0738, 0.109),
    "narrow": Errors(5, 0.332, 0.478),
}
#: Products of matrices, and heads, are narrow below these: those of the fitted measurements are not.
_PRODUCT_WIDTH, _HEAD_WIDTH = 720, 64


class Prediction(msgspec.Struct, frozen=True):
    """A predicted latency, and its parts.

    Attributes:
        milliseconds: of one run on the GPU, without server and network: the sum of the three parts.
        low_ms: the prediction divided by 1 and the widest band of its regimes; ``high_ms`` is multiplied by it.
        launch_ms: the fixed time of all kernels.
        compute_ms: of products and attentions that take longer to compute than to read and write.
        memory_ms: of the bytes of all others.
        gflop: 10⁹ operations, all precisions together.
        bound_by: the largest of the three parts.
        regimes: of the band.
    """

    milliseconds: float
    low_ms: float
    high_ms: float
    launch_ms: float
    compute_ms: float
    memory_ms: float
    gflop: float
    kernels: int
    bound_by: BoundBy
    regimes: tuple[Regime, ...]


def predict(work: Work, kernels: int | None, mode: Mode, constants: Constants = FITTED) -> Prediction:
    """Predict the latency of a run.

    Args:
        kernels: of the engine, where they are known; None for those of the graph's structure.
    """
    others = work.others if kernels is None else max(kernels - len(work.kernels), 0)
    launch = compute = memory = 0.0
    for kernel, count in (*((each, 1) for each in work.kernels), (work.other, others)):
        launch += count * (constants.other_ms if kernel.kind == "other" else constants.product_ms)
        computing, moving = _times(kernel, mode, constants)
        if computing > moving:
            compute += count * computing
        else:
            memory += count * moving
    launch *= _CLOCK_MHZ / mode.gpu_mhz
    total = len(work.kernels) + others
    return summed(launch, compute, memory, sum(work.gflop.values()), total, _qualities(work))


def summed(
    launch_ms: float, compute_ms: float, memory_ms: float, gflop: float, kernels: int, qualities: tuple[Regime, ...]
) -> Prediction:
    """Return the prediction with these parts.

    Args:
        qualities: the regimes besides what binds the run.
    """
    parts: dict[BoundBy, float] = {"kernels": launch_ms, "products": compute_ms, "memory": memory_ms}
    bound_by = max(parts, key=parts.__getitem__)
    # The errors of INT8 are those of its products and bytes; kernels take as long in every precision.
    regimes = qualities if "int8" in qualities and bound_by != "kernels" else (bound_by, *qualities)
    total = launch_ms + compute_ms + memory_ms
    band = 1 + max(ERRORS[regime].band for regime in regimes)
    return Prediction(
        total, total / band, total * band, launch_ms, compute_ms, memory_ms, gflop, kernels, bound_by, regimes
    )


def total(runs: Sequence[tuple[float, Prediction]]) -> Prediction:
    """Return the prediction of runs in turn, each so many times."""
    if len(runs) == 1 and runs[0][0] == 1:
        return runs[0][1]
    names = ("launch_ms", "compute_ms", "memory_ms", "gflop", "kernels")
    launch, compute, memory, gflop, kernels = (sum(n * getattr(one, name) for n, one in runs) for name in names)
    bounds = get_args(BoundBy)
    qualities = dict.fromkeys(regime for _, one in runs for regime in one.regimes if regime not in bounds)
    return summed(launch, compute, memory, gflop, round(kernels), tuple(qualities))


def _times(kernel: Kernel, mode: Mode, constants: Constants) -> tuple[float, float]:
    """Return the milliseconds of a kernel's operations and of its bytes."""
    share = constants.attention if kernel.kind == "attention" else constants.product * kernel.used_rows
    if kernel.precision == "int8" and not kernel.convolution:
        share *= constants.int8
    moved = kernel.weight_bytes + kernel.activation_bytes
    computing = kernel.gflop / (share * mode.tflops(kernel.precision))
    return computing, 1e-6 * moved / (constants.memory * mode.peak_gb_per_s)


def _qualities(work: Work) -> tuple[Regime, ...]:
    applying: dict[Regime, bool] = {
        "int8": "int8" in work.gflop,
        "batch": work.batch > 1,
        "narrow": _narrow(work, "product", _PRODUCT_WIDTH) or _narrow(work, "attention", _HEAD_WIDTH),
    }
    return tuple(regime for regime, applies in applying.items() if applies)


def _narrow(work: Work, kind: str, least: int) -> bool:
    """Return whether most operations of a kind, convolutions aside, are in kernels narrower than ``least``."""
    kernels = [kernel for kernel in work.kernels if kernel.kind == kind and not kernel.convolution]
    narrow = sum(kernel.gflop for kernel in kernels if kernel.inner < least)
    return 2 * narrow > sum(kernel.gflop for kernel in kernels)
