"""The tables of README.md beside this file, which ``python -m export.estimate.document`` writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from export.estimate.document import Compared, compare, errors, fit
from export.estimate.measurements import published
from export.estimate.roofline import FITTED, Constants

README = Path(__file__).parent / "README.md"
#: The tables begin here and go on to the end.
HEADING = "## Constants\n"


def tables(compared: Sequence[Compared]) -> str:
    """Return the part of README.md that follows from the measurements."""
    fitted = [one for one in compared if not one.measurement.check]
    checks = [one for one in compared if one.measurement.check]
    everything = published()
    unused = sum(each.rows for each in everything.unused)
    return "\n".join(
        [
            HEADING,
            *_constants(FITTED),
            "\n## Errors by regime\n",
            *_errors(compared),
            f"\n## The {len(fitted)} measurements of the fit\n",
            *_rows(fitted),
            f"\n## {len(checks)} measurements beside it\n",
            *_rows(checks),
            "",
            *(f"- {reason}" for reason in _reasons(checks)),
            f"\n## {unused} published figures that are not used\n",
            *_table(("figures", "what", "why not"), ((each.rows, each.what, each.why) for each in everything.unused)),
            "\n## Sources\n",
            *_table(("key", "repository, file, runtime"), everything.sources.items()),
            "",
        ]
    )


def _constants(constants: Constants) -> list[str]:
    rows = (
        ("fixed time of a product or attention, at 1,020 MHz", f"{1e3 * constants.product_ms:.3g} µs"),
        ("fixed time of any other kernel", f"{1e3 * constants.other_ms:.3g} µs"),
        ("products, share of the peak of FP16 with full tiles", f"{constants.product:.1%}"),
        ("products of matrices in INT8, of that share", f"{constants.int8:.1%}"),
        ("attention, share of the FP16 peak", f"{constants.attention:.1%}"),
        ("memory, share of its peak", f"{constants.memory:.1%}"),
    )
    return _table(("constant", "fitted"), rows)


def _errors(compared: Sequence[Compared]) -> list[str]:
    rows = (
        (regime, each.count, f"{each.rms:.1%}", f"{each.largest:.0%}", f"{each.band:.0%}")
        for regime, each in errors(compared).items()
    )
    return _table(("regime", "n", "RMS", "largest", "band"), rows)


def _rows(compared: Sequence[Compared]) -> list[str]:
    graphs = {True: "yes", False: "no", None: "not stated"}
    rows = []
    for one in compared:
        run, found = one.measurement, one.prediction
        left_out = "" if run.check else f"{one.left_out_error:+.0%}"
        sizes = (f"{run.gpu_mhz:,.0f}", run.precision.upper(), run.batch, graphs[run.cuda_graph], found.kernels)
        times = (f"{run.ms:.4g}", f"{found.milliseconds:.4g}", f"{one.error:+.0%}", left_out)
        note = f" ({run.note})" if run.note else ""
        rows.append((f"{run.network}{note}", run.source, *sizes, *times, ", ".join(found.regimes)))
    header = ("network", "source", "MHz", "precision", "rows", "graph", "kernels", "ms", "predicted", "error")
    return _table((*header, "left out", "regime"), rows)


def _reasons(checks: Sequence[Compared]) -> Iterable[str]:
    names: dict[str, dict[str, None]] = {}
    for one in checks:
        names.setdefault(one.measurement.check, {})[one.measurement.network] = None
    return (f"{', '.join(networks)}: {reason}." for reason, networks in names.items())


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines]


@click.command()
def main() -> None:
    """Fit the constants and write the tables; the constants of roofline.py are to be those that this prints."""
    compared = compare()
    click.echo(fit([one for one in published().measurements if not one.check]))
    for regime, each in errors(compared).items():
        click.echo(f"{regime}: {each}")
    README.write_text(README.read_text().split(HEADING)[0] + tables(compared))


if __name__ == "__main__":
    main()
