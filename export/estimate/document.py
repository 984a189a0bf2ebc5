"""The fit of the prediction's constants to published latencies, and the tables of README.md.

``python -m export.estimate.document`` fits them and writes the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, get_args

import click
import numpy as np
from scipy.optimize import least_squares

from export.estimate.measurements import Measurement, published
from export.estimate.roofline import FITTED, Constants, Errors, Prediction, Regime, predict
from export.report.table import Table, with_tables, write_pages

#: Where the search begins. A constant that no remaining measurement depends on stays here: INT8 as FP16.
_START = Constants(product_ms=0.01, other_ms=0.006, product=0.5, int8=1.0, attention=0.1, memory=0.9)
#: Weight of the squared distance to it beside a measurement's squared error.
_STAY = 1e-3


class Compared(NamedTuple):
    """A measurement, its prediction by the fit to all, and by a fit without its network; no fit uses a ``check``."""

    measurement: Measurement
    prediction: Prediction
    left_out: Prediction

    @property
    def error(self) -> float:
        """The prediction over the measurement, less 1."""
        return self.prediction.milliseconds / self.measurement.ms - 1

    @property
    def left_out_error(self) -> float:
        """The prediction without this network over the measurement, less 1."""
        return self.left_out.milliseconds / self.measurement.ms - 1


def fit(measurements: Sequence[Measurement]) -> Constants:
    """Return the constants with the least squares of the logarithms of the ratios of prediction to measurement."""
    names = Constants.__struct_fields__
    start = np.log([getattr(_START, name) for name in names])
    runs = [(one.work, one.mode, one.ms) for one in measurements]

    def residuals(logarithms: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[float]:
        constants = Constants(*map(float, np.exp(logarithms)))
        errors = [float(np.log(predict(work, None, mode, constants).milliseconds / ms)) for work, mode, ms in runs]
        return [*errors, *(_STAY * (logarithms - start))]

    solution = least_squares(residuals, start, diff_step=1e-4)
    return Constants(*map(_rounded, np.exp(solution.x)))


def compare() -> tuple[Compared, ...]:
    """Return all measurements beside their predictions."""
    everything = published().measurements
    fitted = [one for one in everything if not one.check]
    without = {name: fit([one for one in fitted if one.network != name]) for name in {one.network for one in fitted}}
    return tuple(
        Compared(
            one, predict(one.work, None, one.mode), predict(one.work, None, one.mode, without.get(one.network, FITTED))
        )
        for one in everything
    )


def errors(compared: Sequence[Compared]) -> dict[Regime, Errors]:
    """Return the errors by regime.

    Fitted measurements count with the prediction of a fit without their network. Narrow networks were not fitted to.
    """
    by_regime: dict[Regime, Errors] = {}
    for regime in get_args(Regime):
        shares = [
            one.left_out_error
            for one in compared
            if regime in one.prediction.regimes and (regime == "narrow" or not one.measurement.check)
        ]
        by_regime[regime] = Errors(
            len(shares), _rounded(np.sqrt(np.mean(np.square(shares)))), _rounded(max(map(abs, shares)))
        )
    return by_regime


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


README = Path(__file__).parent / "README.md"


def pages() -> dict[Path, str]:
    """Return README.md, with its tables made from the measurements."""
    compared, everything = compare(), published()
    checks = [one for one in compared if one.measurement.check]
    unused = [(each.what, each.why, each.rows) for each in everything.unused]
    tables = {
        "constants": _constants(FITTED),
        "errors": _errors(compared),
        "fitted": _rows([one for one in compared if not one.measurement.check]),
        "checks": _rows(checks),
        "reasons": Table("", ("not fitted to", "because"), _reasons(checks), 2),
        "unused": Table("", ("figures", "why not", "number"), [*unused, ("all", "", sum(row[2] for row in unused))], 2),
        "sources": Table("", ("key", "repository, file, runtime"), [*everything.sources.items()], 2),
    }
    by_record = {f"export/estimate/measurements.json#{name}": table for name, table in tables.items()}
    return {README: with_tables(README.read_text(), "python -m export.estimate.document", by_record)}


def _constants(constants: Constants) -> Table:
    rows = (
        ("fixed time of a product or attention, at 1,020 MHz", f"{1e3 * constants.product_ms:.3g} µs"),
        ("fixed time of any other kernel", f"{1e3 * constants.other_ms:.3g} µs"),
        ("products, share of the peak of FP16 with full tiles", f"{constants.product:.1%}"),
        ("products of matrices in INT8, of that share", f"{constants.int8:.1%}"),
        ("attention, share of the FP16 peak", f"{constants.attention:.1%}"),
        ("memory, share of its peak", f"{constants.memory:.1%}"),
    )
    return Table("", ("constant", "fitted"), rows)


def _errors(compared: Sequence[Compared]) -> Table:
    rows = [
        (regime, each.count, f"{each.rms:.1%}", f"{each.largest:.0%}", f"{each.band:.0%}")
        for regime, each in errors(compared).items()
    ]
    return Table("", ("regime", "n", "RMS", "largest", "band"), rows)


def _rows(compared: Sequence[Compared]) -> Table:
    graphs = {True: "yes", False: "no", None: "not stated"}
    rows = []
    for one in compared:
        run, prediction = one.measurement, one.prediction
        left_out = "" if run.check else f"{one.left_out_error:+.0%}"
        sizes = (run.precision.upper(), graphs[run.cuda_graph], f"{run.gpu_mhz:,.0f}", run.batch, prediction.kernels)
        times = (f"{run.ms:.4g}", f"{prediction.milliseconds:.4g}", f"{one.error:+.0%}", left_out)
        note = f" ({run.note})" if run.note else ""
        rows.append((f"{run.network}{note}", run.source, ", ".join(prediction.regimes), *sizes, *times))
    heads = ("network", "source", "regime", "precision", "graph", "MHz", "rows", "kernels", "ms", "predicted", "error")
    return Table("", (*heads, "left out"), rows, 5)


def _reasons(checks: Sequence[Compared]) -> list[tuple[str, str]]:
    names: dict[str, dict[str, None]] = {}
    for one in checks:
        names.setdefault(one.measurement.check, {})[one.measurement.network] = None
    return [(", ".join(networks), reason) for reason, networks in names.items()]


@click.command()
def main() -> None:
    """Fit the constants and write the tables; the constants of roofline.py are to be those that this prints."""
    click.echo(fit([one for one in published().measurements if not one.check]))
    for regime, each in errors(compare()).items():
        click.echo(f"{regime}: {each}")
    write_pages(pages())


if __name__ == "__main__":
    main()
