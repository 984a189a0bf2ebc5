"""A served model: its bundle, its preprocessing and its loaded runners."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from edge.bundles.boxes import Picture
from edge.bundles.bundle import Bundle
from edge.bundles.fields import Role
from edge.bundles.golden import check_outputs
from edge.bundles.image import ImagePreprocessor
from edge.bundles.manifest import Serving
from edge.bundles.preprocess import (
    GoOn,
    TokenizerPreprocessor,
    always,
    made_outputs,
    postprocessors,
    preprocessor,
)
from edge.bundles.programs import CascadeProgram, GenerateProgram, HeadBase, HeadProgram, LoopProgram
from edge.bundles.spans import Context
from edge.bundles.steps import MOST_BOXES, BoxPostprocess, LabelPostprocess, SpanPostprocess
from edge.datatypes import Array, TensorSpec
from edge.errors import InvalidRequest, Raw
from edge.programs.backward_head import LogitHead
from edge.programs.generate import BY_TOKEN, Generate
from edge.programs.loop import Loop, limits_of
from edge.programs.program import AUTO, AppliedHead, IterativeProgram, Options
from edge.programs.sampling import sampling_of
from edge.programs.tier_program import golden_options, program_of
from edge.protocol import TOP_K
from edge.runtimes.build import Loaded
from edge.scheduling.batching import BatchAssembler, nonfinite, within
from edge.scheduling.job import UseCount
from edge.scheduling.latency import LatencyModel
from edge.scheduling.tier_executor import ServingOptions, TierExecutor, executor_class
from edge.scheduling.tier_selection import DEADLINE, PINNED, ROUTER, TierSelector, accuracies

#: Runs of each tier after it is loaded, for a first estimate of its latency.
_MEASURED_RUNS = 3
Shapes = Mapping[str, tuple[int, ...]]
#: A head is trained for an alpha of 1; much larger ones only make infinities.
_MOST_ALPHA = 1000


class Inputs(NamedTuple):
    """The inputs of a graph, and what answers are made of: contexts, whose windows are the rows, or pictures."""

    tensors: dict[str, Array]
    contexts: Sequence[Context] = ()
    pictures: Sequence[Picture] = ()


class Model:
    """One loaded bundle.

    Attributes:
        tiers: the runner and golden report of each tier by name, the full one first; of a loop, those of its step.
        executors: the tiers, and the router under ``auto``, as the scheduler sees them.
        inputs: the tensors that a client may send, by name: the graph's inputs, and the texts or images that replace
            some of them.
        outputs: the tensors that a client may request, by name.
        step: computes inputs of the graph from texts or images; None if clients send those themselves.
        texts: those of them that are texts.
        on_request: those of them that are sent only to clients that ask for them.
        by_token: those of them that have a value for each token.
        derived: computes further outputs, such as a label, a score or probabilities, by name.
        spans: the step that makes answers of logits and texts; None if the model does not answer questions.
        boxes: the step that makes boxes of logits and pictures; None if the model is not a detector.
        labels: the names of the classes by the outputs that have a column for each.
        largest: the limit of the numbers' size, by the inputs that have one.
        optional: the inputs of which a client chooses one or the other.
        chooses: whether the selector decides on requests that name neither a tier nor a policy.
        checks_values: whether requests are checked for more than that; see :meth:`wrong_values`.
        load_memory_bytes: growth of the process while it was loaded, which the loader sets.
        load_ns: how long that took, without builds, which the loader sets, too.
        loaded_at: when it was loaded, in seconds since 1970.
    """

    def __init__(
        self,
        bundle: Bundle,
        files: Mapping[tuple[str, Role], Loaded],
        *,
        options: ServingOptions = ServingOptions(),  # noqa: B008 - it is frozen
    ) -> None:
        self.manifest = bundle.manifest
        self.name = bundle.manifest.name
        self.version = str(bundle.manifest.version)
        self._files = dict(files)
        roles = bundle.manifest.roles
        self.tiers = {tier: loaded for (tier, role), loaded in files.items() if role == roles[-1]}
        self.full_tier = bundle.manifest.tiers[0].name
        full = self.tiers[self.full_tier]
        self.runner, self.runtime, self.file = full.runner, full.runtime, full.artifact.file
        self.golden_diffs: dict[str, float] = {}
        for (tier, _), loaded in files.items():
            self.golden_diffs[tier] = max(loaded.golden_report.max_abs_diff, self.golden_diffs.get(tier, 0.0))
        self.instances = options.instances
        self.use = UseCount()
        self.load_memory_bytes = self.load_ns = 0
        self.loaded_at = int(time.time())
        self.step = preprocessor(bundle)
        self.derived = {derived.output.name: derived for derived in postprocessors(bundle.manifest)}
        label = bundle.manifest.postprocess
        self.labels: dict[str, tuple[str, ...]] = {}
        if isinstance(label, LabelPostprocess):
            self.labels = {name: label.labels for name in (label.logits, *self.derived) if name != label.output}
        texts, computed = (self.step.inputs, self.step.graph_inputs) if self.step else ((), ())
        self.spans = label if isinstance(label, SpanPostprocess) else None
        self.boxes = label if isinstance(label, BoxPostprocess) else None
        made = made_outputs(bundle.manifest)
        self.inputs: dict[str, TensorSpec] = {spec.name: spec for spec in (*texts, *bundle.manifest.inputs)}
        self.outputs: dict[str, TensorSpec] = {spec.name: spec for spec in (*bundle.manifest.outputs, *made)}
        self.by_token: tuple[str, ...] = ()
        limit = None if self.step is None or self.step.largest is None else np.float32(self.step.largest)
        self.largest: dict[str, np.float32] = {} if limit is None else dict.fromkeys(computed, limit)
        self.optional = {*(spec.name for spec in texts), *computed}
        self._serving = bundle.manifest.serving or Serving()
        program = bundle.manifest.program
        self._cascade = program if isinstance(program, CascadeProgram) else None
        self.program = program_of(bundle, {key: loaded.runner for key, loaded in files.items()})
        self.checks_values = isinstance(self.program, IterativeProgram)
        self._vocabulary = 0
        if isinstance(program, GenerateProgram):
            self.outputs |= {spec.name: spec for spec in BY_TOKEN}
            self.by_token = tuple(spec.name for spec in BY_TOKEN)
            logits = bundle.manifest.tensors(bundle.manifest.tiers[0].artifacts[0]).outputs
            self._vocabulary = next(spec.shape[1] for spec in logits if spec.name == program.logits)
        self.texts = frozenset(name for name, spec in self.outputs.items() if spec.datatype == "BYTES")
        self._texts = [spec.name for spec in texts]
        self.on_request = (*self.by_token, *(name for name in self.derived if name in self.labels))  # probabilities
        self.executors = self._executors(options)
        default_policy = self._serving.policy or (ROUTER if self._cascade and self._cascade.default else PINNED)
        known = accuracies(bundle.manifest.measures, {tier: file.artifact.runtime for tier, file in self.tiers.items()})
        self.selector = TierSelector(self.name, self.executors, options.policy or default_policy, known)
        loops = isinstance(self.program, IterativeProgram)
        self.chooses = len(self.executors) > 1 or (loops and self.selector.policy == DEADLINE)
        self._golden = bundle.goldens

    def check_steps(self) -> None:
        """Raise a GoldenError if a loop of a fixed number of steps, a text or a head does not repeat the golden set."""
        if not isinstance(self.program, (IterativeProgram, LogitHead)):
            return
        for tier, loaded in self.tiers.items():
            golden = self._golden[tier]
            outputs = self.program.compute(golden.inputs, golden_options(self.manifest.program, tier, golden)).outputs
            check_outputs(outputs, golden, loaded.artifact.tolerance, f"{self.name} tier {tier}")

    def measure(self) -> None:
        """Measure the latency of each tier for one golden row, or the whole golden set where it has no rows."""
        for name, executor in self.executors.items():
            executor.measure(self.golden_row(name), _MEASURED_RUNS)

    def golden_row(self, tier: str) -> dict[str, Array]:
        """Return golden inputs of a tier: one row, or the whole set where it has no rows."""
        golden = self._golden[self.full_tier if tier == AUTO else tier]
        return {key: array[:1] if self.manifest.max_batch_size else array for key, array in golden.inputs.items()}

    def close(self) -> None:
        """Close every runner, on the thread that owns the device; raise a RuntimeError if a run still uses it."""
        self.use.end()
        if self.use.users:
            raise RuntimeError(f"{self.name}:{self.version} cannot be closed: {self.use.users} runs still use it")
        self.program.close()
        for loaded in self._files.values():
            loaded.runner.close()

    def _executors(self, options: ServingOptions) -> dict[str, TierExecutor]:
        delay_us, cascade = options.max_queue_delay_us, self._cascade
        if delay_us is None:
            delay_us = self._serving.max_queue_delay_us
        executors: dict[str, TierExecutor] = {}
        for name in [*self.tiers, *([AUTO] if cascade else [])]:
            tiers = (cascade.lean, cascade.full) if name == AUTO and cascade else (name,)
            # A tier whose rows depend on one another gives every request its own run.
            joined = options.batching and all(self.tiers[tier].row_independent for tier in tiers)
            max_rows, latency = self.manifest.max_batch_size if joined else 0, LatencyModel()
            # The others run several files, or choose the shapes of their runs themselves.
            is_one_run = len(tiers) == 1 and not isinstance(self.program, (IterativeProgram, LogitHead))
            assembler = BatchAssembler.of(
                self.manifest,
                few_shapes=self.runtime.few_shapes,
                most_rows=max_rows if is_one_run else 0,
                latency=latency if is_one_run else None,
            )
            executors[name] = executor_class(self.program)(
                name,
                self.program,
                assembler,
                max_rows=max_rows,
                latency=latency,
                max_delay_seconds=delay_us / 1e6,
                preferred_rows=self._serving.preferred_batch_sizes,
                model=f"{self.name}:{self.version}",
                on_gpu=any(self.tiers[tier].runner.device == "GPU" for tier in tiers),
            )
        return executors

    def check_shapes(self, shapes: Shapes) -> int:
        """Check the shapes of a request's tensors by name, before any is decoded, and return the number of rows.

        Raise an InvalidRequest if an input is missing or superfluous, the batch is too large or uneven, or a shape is
        outside the profile.
        """
        rows = self._rows(shapes)
        self._check_points(shapes)
        texts, computed = self._texts, self.step.graph_inputs if self.step else ()
        sent = [name for name in texts if name in shapes]
        if sent:
            if both := [name for name in computed if name in shapes]:
                given = Raw(f"{sent[0]!r} and {both[0]!r}")
                raise self._invalid("inputs", given, "one of them", f"{sent[0]!r} stands for {both[0]!r}.")
            if missing := [name for name in texts if name not in shapes]:
                fix = f"This model reads them together; add {missing[0]!r}."
                raise self._invalid("inputs", Raw(f"only {sent[0]!r}"), " and ".join(map(repr, texts)), fix)
        for spec in self.manifest.inputs:
            if spec.name in shapes:
                self._check_profile(spec.name, shapes[spec.name])
            elif not sent or spec.name not in computed:
                alternative = f" (or {' and '.join(map(repr, texts))})" if spec.name in computed else ""
                given = Raw(f"only {sorted(shapes)}")
                raise self._invalid("inputs", given, f"{spec.name!r}{alternative}", "Add it.")
            else:
                profile, given_rows = self.manifest.profile.get(spec.name), shapes[sent[0]][0]
                most = profile.max[0] if profile else spec.shape[0]
                if 0 <= most < given_rows:  # of a model without a batch, too
                    given = Raw(f"{given_rows} rows")
                    raise self._invalid(f"input {sent[0]!r}", given, f"at most {most}", "Split the request.")
        return rows

    def prepare(self, arrays: Mapping[str, Array], go_on: GoOn = always) -> Inputs:
        """Return the inputs of the graph for tensors whose shapes were checked; on any thread.

        Raises:
            InvalidRequest: a text or an image cannot be read, its tokens are outside the profile or make too many
                windows, or values are wrong.
        """
        inputs, step = dict(arrays), self.step
        contexts: Sequence[Context] = ()
        pictures: Sequence[Picture] = ()
        if step and step.inputs[0].name in inputs:
            sent = [inputs.pop(spec.name) for spec in step.inputs]
            if self.spans:
                computed, contexts = self._windows(sent, go_on)
            elif self.boxes and isinstance(step, ImagePreprocessor):
                computed, pictures = step.placed(*sent, go_on=go_on)
            else:
                computed = step(*sent, go_on=go_on)
            for name, array in computed.items():
                self._check_profile(name, array.shape)
            inputs |= computed
        if error := self.wrong_values(inputs):
            raise error
        return Inputs(inputs, contexts, pictures)

    def _windows(self, texts: Sequence[Array], go_on: GoOn) -> tuple[dict[str, Array], list[Context]]:
        step, most = self.step, self.manifest.max_batch_size
        assert isinstance(step, TokenizerPreprocessor)
        rows, contexts = [], []
        for windows, context in step.windows(*texts, go_on=go_on):
            rows += windows
            contexts.append(context)
            if len(rows) > most:
                given, expected = Raw(f"more than {most} windows of tokens"), f"at most {most} in a request"
                fix = "Shorten the contexts, or split the request."
                raise self._invalid(f"input {step.inputs[1].name!r}", given, expected, fix)
        return step.padded(rows), contexts

    def _check_profile(self, name: str, shape: tuple[int, ...]) -> None:
        profile = self.manifest.profile.get(name)
        if not profile:
            return
        for least, size, most in zip(profile.min, shape, profile.max, strict=True):
            if not least <= size <= most:
                expected = f"between {list(profile.min)} and {list(profile.max)}"
                raise self._invalid(f"input {name!r} shape", list(shape), expected, "Shorten or split the request.")

    def apply_head(self, options: Options, head: Model, alpha: float | None) -> Options:
        """Return options that apply a head; no alpha is the head's own.

        Raise an InvalidRequest if this model generates no text, or the other one is not a head of it.
        """
        config, program = head.manifest.program, self.manifest.program
        if not isinstance(program, GenerateProgram):
            raise self._superfluous({"head": head.name}, "none: the model generates no text")
        file = self.manifest.tiers[0].artifacts[0].file
        base = HeadBase(name=self.name, version=self.manifest.version, sha256=self.manifest.files[file].sha256)
        if not isinstance(config, HeadProgram) or config.base != base:
            of = f"a head of {config.base.name} {config.base.version}" if isinstance(config, HeadProgram) else "no head"
            expected = f"a head of {self.name} {self.version} with the same weights"
            fix = "Name a head that was trained for this model; RepositoryIndex lists all."
            raise self._invalid("parameter 'head'", Raw(f"{head.name!r}, {of}"), expected, fix)
        alpha = config.usual_alpha if alpha is None else alpha
        if not abs(alpha) <= _MOST_ALPHA:
            fix = f"{config.usual_alpha:g} is the default."
            raise self._invalid("parameter 'alpha'", alpha, f"-{_MOST_ALPHA} to {_MOST_ALPHA}", fix)
        assert isinstance(head.program, LogitHead)
        return options._replace(head=AppliedHead(head.program, alpha))

    def wrong_values(self, inputs: Mapping[str, Array]) -> InvalidRequest | None:
        """Return what is wrong with the values of a request's tensors; None if nothing is.

        Those of a loop must be finite, those of a prompt token ids and a mask, and the tokens of an expression finite
        and no larger than its operands may be.
        """
        for name, largest in self.largest.items():
            good = within(inputs[name], largest)
            if not good.all():
                row, column = np.argwhere(~good)[0]
                given = Raw(f"{inputs[name][row, column]:g}")
                what, fix = f"input {name!r} row {row + 1} column {column + 1}", "Replace it by a number in this range."
                return self._invalid(what, given, f"a number between {-largest:g} and {largest:g}", fix)
        if isinstance(self.program, Loop) and (wrong := nonfinite(inputs)):
            fix = "A loop would never settle; replace the values that are missing."
            return self._invalid(f"input {wrong[0]!r}", Raw("NaN or Inf"), "finite numbers", fix)
        if isinstance(self.program, Generate):
            ids, mask = inputs[self.program.ids], inputs[self.program.mask]
            if ids.shape != mask.shape or not 0 <= ids.min() <= ids.max() < self._vocabulary:
                expected = f"as many as {self.program.mask!r} has, from 0 to {self._vocabulary - 1}"
                fix = "Use the model's tokenizer, or send text."
                return self._invalid(f"input {self.program.ids!r}", Raw("other token ids"), expected, fix)
            lengths = mask.sum(axis=1, keepdims=True)
            if lengths.min(initial=1) < 1 or not np.array_equal(mask, np.arange(mask.shape[1]) < lengths):
                expected, fix = "ones, at least one, and then zeros in each row", "Put the padding behind the prompt."
                return self._invalid(f"input {self.program.mask!r}", Raw("another mask"), expected, fix)
        return None

    def options(self, loop: Mapping[str, Any], text: Mapping[str, Any]) -> Options:
        """Return the options of the full tier for the parameters of a loop, and of generated text, that a request sets.

        Raise an InvalidRequest if the model has no such parameters, or a value is out of range.
        """
        program, options = self.manifest.program, Options(self.full_tier)
        if loop and not isinstance(program, LoopProgram):
            raise self._superfluous(loop, "none: the model is not a loop")
        if self.boxes:
            most = text.get(TOP_K, 1)
            if not 1 <= most <= MOST_BOXES:
                fix = f"{self.boxes.top_k} is the default."
                raise self._invalid(f"parameter {TOP_K!r}", most, f"1 to {MOST_BOXES}", fix)
            text = {name: value for name, value in text.items() if name != TOP_K}
        if text and not isinstance(program, GenerateProgram):
            raise self._superfluous(text, "none: the model generates no text")
        if isinstance(program, LoopProgram) and loop:
            return options._replace(limits=limits_of(program, self.name, **loop))
        if isinstance(program, GenerateProgram) and text:
            return options._replace(sampling=sampling_of(program, self.name, text))
        return options

    def _superfluous(self, parameters: Mapping[str, Any], expected: str) -> InvalidRequest:
        name, value = next(iter(parameters.items()))
        return self._invalid(f"parameter {name!r}", value, expected, "Leave it out.")

    def _rows(self, shapes: Shapes) -> int:
        limit = self.manifest.max_batch_size
        if not limit or not shapes:
            return 1  # without a batch dimension
        rows, *others = {shape[0] for shape in shapes.values()}
        if others:
            batches = {name: shape[0] for name, shape in shapes.items()}
            raise self._invalid("batch", batches, "the same first dimension everywhere", "Send as many rows each.")
        if rows > limit:
            raise self._invalid("batch", Raw(f"{rows} rows"), f"at most {limit}", "Split the request.")
        return rows

    def _check_points(self, shapes: Shapes) -> None:
        loop = self.manifest.program
        if not isinstance(loop, LoopProgram) or not loop.points or not loop.values:
            return
        if not {loop.points, loop.values} <= shapes.keys():  # the missing one is reported with the others
            return
        points, values = shapes[loop.points][1], shapes[loop.values][1]
        if points != values + 1:
            given = Raw(f"{points} points and {values} values")
            fix = "Give the value of each point but the last, whose value is predicted."
            raise self._invalid(f"{loop.points!r} and {loop.values!r}", given, "one point more than values", fix)

    def _invalid(self, what: str, given: object, expected: str, fix: str) -> InvalidRequest:
        return InvalidRequest(f"{what} of {self.name!r}", given=given, expected=expected, fix=fix)
