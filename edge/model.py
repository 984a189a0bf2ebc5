"""A model that can be asked: a bundle, its preprocessing, its loaded runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edge.build import Loaded
from edge.bundle import Bundle
from edge.datatypes import Array, TensorSpec
from edge.errors import InvalidRequest, Literally
from edge.postprocess import postprocessor
from edge.preprocess import preprocessor
from edge.router import AUTO, cascade
from edge.runner import Runner


@dataclass(frozen=True)
class Feeds:
    """What the runner gets for one request: its inputs, and how many rows they hold."""

    inputs: dict[str, Array]
    rows: int


class Model:
    """One loaded bundle.

    Attributes:
        name: its name.
        version: its version, as the protocol writes it.
        manifest: its manifest.
        tiers: the runner and golden report of each tier by name, the full one first. Only the device thread may call
            the runners.
        inputs: what a client may send, by name: the graph's inputs, and the text that may stand for some of them.
        outputs: what a client may ask for, by name: the graph's outputs, and what is made of them.
        optional: the inputs of which a client chooses one or the other.
        load_memory_bytes: how much the process grew while it was loaded.
    """

    def __init__(self, bundle: Bundle, tiers: Mapping[str, Loaded], load_memory_bytes: int) -> None:
        self.manifest = bundle.manifest
        self.name = bundle.manifest.name
        self.version = str(bundle.manifest.version)
        self.tiers = dict(tiers)
        self.load_memory_bytes = load_memory_bytes
        self._preprocess = preprocessor(bundle)
        self._postprocess = postprocessor(bundle.manifest)
        texts = [self._preprocess.input] if self._preprocess else []
        made = [self._postprocess.output] if self._postprocess else []
        self.inputs: dict[str, TensorSpec] = {spec.name: spec for spec in (*texts, *bundle.manifest.inputs)}
        self.outputs: dict[str, TensorSpec] = {spec.name: spec for spec in (*bundle.manifest.outputs, *made)}
        self.optional = {self._preprocess.input.name, *self._preprocess.outputs} if self._preprocess else set()

    @property
    def full_tier(self) -> str:
        """The name of the largest tier."""
        return self.manifest.tiers[0].name

    @property
    def default_tier(self) -> str:
        """The name of the tier that answers when a request names none: ``auto`` where the manifest says so."""
        return AUTO if self.manifest.router and self.manifest.router.default else self.full_tier

    @property
    def runner(self) -> Runner:
        """The runner of the full tier."""
        return self.tiers[self.full_tier].runner

    @property
    def golden_max_abs_diff(self) -> float:
        """The largest difference of any tier from its golden outputs."""
        return max(loaded.golden_report.max_abs_diff for loaded in self.tiers.values())

    def check_tier(self, name: str) -> None:
        """Check that a request may name a tier.

        Raises:
            InvalidRequest: there is no such tier.
        """
        known = [*self.tiers, *([AUTO] if self.manifest.router else [])]
        if name not in known:
            expected = f"one of {', '.join(known)}"
            raise self._invalid("parameter 'tier'", name, expected, f"Leave it out for {self.default_tier}.")

    def infer(self, tier: str, inputs: Mapping[str, Array]) -> tuple[dict[str, Array], str]:
        """Compute a tier, or let the router choose; on the device thread.

        Returns:
            The outputs of the graph, and the name of the tier that gave them, or of both with a comma between.

        Raises:
            RequestError: as the runner's.
        """
        router = self.manifest.router
        if tier == AUTO and router:
            lean, full = (self.tiers[name].runner.infer for name in (router.lean, router.full))
            return cascade(router, lean, full, inputs)
        return self.tiers[tier].runner.infer(inputs), tier

    def complete(self, outputs: dict[str, Array]) -> dict[str, Array]:
        """Return the outputs of the graph and what the manifest makes of them, such as labels."""
        step = self._postprocess
        return {**outputs, step.output.name: step(outputs[step.reads])} if step else outputs

    def close(self) -> None:
        """Close every runner; on the device thread."""
        for loaded in self.tiers.values():
            loaded.runner.close()

    def prepare(self, arrays: Mapping[str, Array]) -> Feeds:
        """Check a request's tensors against the batch limit and the profile, and preprocess them.

        Raises:
            InvalidRequest: an input is missing or superfluous, the batch is too large or uneven, a shape is outside
                the profile, or a text cannot be read.
        """
        rows = self._rows(arrays)
        inputs = dict(arrays)
        step = self._preprocess
        if step and step.input.name in inputs:
            both = [name for name in step.outputs if name in inputs]
            if both:
                given = Literally(f"{step.input.name!r} and {both[0]!r}")
                raise self._invalid("inputs", given, "one of them", f"{step.input.name!r} stands for {both[0]!r}.")
            inputs.update(step(inputs.pop(step.input.name)))
        for spec in self.manifest.inputs:
            if spec.name not in inputs:
                alternative = f" (or {step.input.name!r})" if step and spec.name in step.outputs else ""
                given = Literally(f"only {sorted(arrays)}")
                raise self._invalid("inputs", given, f"{spec.name!r}{alternative}", "Add it.")
            self._check_profile(spec.name, inputs[spec.name].shape)
        return Feeds(inputs, rows)

    def _rows(self, arrays: Mapping[str, Array]) -> int:
        """Return the batch size; 1 for models without a batch dimension."""
        limit = self.manifest.max_batch_size
        if not limit or not arrays:
            return 1
        batches: dict[str, int] = {name: array.shape[0] for name, array in arrays.items()}
        rows = max(batches.values())
        if min(batches.values()) != rows:
            raise self._invalid("batch", batches, "the same first dimension everywhere", "Send as many rows each.")
        if rows > limit:
            raise self._invalid("batch", Literally(f"{rows} rows"), f"at most {limit}", "Split the request.")
        return rows

    def _check_profile(self, name: str, shape: tuple[int, ...]) -> None:
        profile = self.manifest.profile.get(name)
        if profile and not all(a <= b <= c for a, b, c in zip(profile.min, shape, profile.max, strict=True)):
            expected = f"between {list(profile.min)} and {list(profile.max)}"
            raise self._invalid(f"input {name!r} shape", list(shape), expected, "Shorten or split the request.")

    def _invalid(self, what: str, given: object, expected: str, fix: str) -> InvalidRequest:
        return InvalidRequest(f"{what} of {self.name!r}", given=given, expected=expected, fix=fix)
