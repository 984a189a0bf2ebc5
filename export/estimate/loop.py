"""Latency of the tiers of a looped bundle on a board: an embedding, and one step for each loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

from edge.bundles.bundle import Bundle
from edge.bundles.manifest import Profile, Tier
from edge.bundles.programs import LoopProgram
from edge.errors import FewheadsError, Literally, UsageError
from edge.profiling.table import PREDICTION
from edge.programs.tier_program import golden_loops, load_tier
from export.estimate.devices import Mode
from export.estimate.model import TierModel
from export.estimate.roofline import Prediction, summed
from export.estimate.rows import Row


def loop_rows(
    bundle: Bundle,
    mode: Mode,
    *,
    batches: Sequence[int],
    loops: float | None = None,
    on_tier: Callable[[int, int], None] = lambda done, tiers: None,
) -> tuple[Row, ...]:
    """Predict the embedding, one step, and a request of each tier, for the longest prompts that it is tuned for.

    Args:
        loops: of a request; None is the mean of the golden prompts on this machine, within the model's own limits.
    """
    tiers = bundle.manifest.tiers
    rows: list[Row] = []
    first: dict[tuple[int, str], float] = {}
    for done, tier in enumerate(tiers):
        mean, source = (loops, "as given") if loops else _mean_loops(bundle, tier)
        files = {role: TierModel(bundle, tier, role) for role in bundle.manifest.roles}
        counted = all(file.launches is not None for file in files.values())
        for batch in batches:
            parts: dict[str, Prediction] = {
                role: file.predict({name: (batch, *one.opt[1:]) for name, one in _profile(bundle, file).items()}, mode)
                for role, file in files.items()
            }
            tokens = next(iter(_profile(bundle, files["step"]).values())).opt[1]
            parts[f"{mean:.3g} loops"] = _sum(parts["embed"], parts["step"], mean)
            for place, (part, found) in enumerate(parts.items()):
                same = (batch, part if place < len(files) else "")
                rows.append(
                    Row(
                        tier=tier.name,
                        precision=files["step"].precision,
                        rows=batch,
                        tokens=tokens,
                        milliseconds=found.milliseconds,
                        prediction=found,
                        times_faster=first.setdefault(same, found.milliseconds) / found.milliseconds,
                        counted=counted,
                        label=PREDICTION,
                        part=part,
                        loops=None if place < len(files) else mean,
                        loops_source="" if place < len(files) else source,
                    )
                )
        on_tier(done + 1, len(tiers))
    return tuple(rows)


def check_options(bundle: Bundle, *, lengths: object, table: object, loops: float | None) -> None:
    """Raise a UsageError if an option does not apply to a bundle, looped or not."""
    looped = isinstance(bundle.manifest.program, LoopProgram)
    given = {"--lengths": lengths, "--latency-table": table} if looped else {"--loops": loops}
    for option, value in given.items():
        if value:
            expected = f"none for {bundle.manifest.name}, which is {'' if looped else 'not '}looped"
            raise UsageError(option, given=Literally(value), expected=expected, fix="Leave it out.")


def _profile(bundle: Bundle, file: TierModel) -> dict[str, Profile]:
    return bundle.manifest.tensors(file.artifact).profile


def _mean_loops(bundle: Bundle, tier: Tier) -> tuple[float, str]:
    try:
        with closing(load_tier(bundle, "onnxruntime", tier=tier.name)) as program:
            return golden_loops(program), "the mean of the golden prompts, within the model's own limits"
    except FewheadsError:  # it has no file for ONNX Runtime
        assert isinstance(bundle.manifest.program, LoopProgram)
        return float(bundle.manifest.program.max_loops), "the model's limit, because this machine cannot run it"


def _sum(embed: Prediction, step: Prediction, loops: float) -> Prediction:
    names = ("launch_ms", "compute_ms", "memory_ms", "gflop", "kernels")
    launch, compute, memory, gflop, kernels = (getattr(embed, name) + loops * getattr(step, name) for name in names)
    qualities = tuple(regime for regime in step.regimes if regime != step.bound_by)
    return summed(launch, compute, memory, gflop, round(kernels), qualities)
