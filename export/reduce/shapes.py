"""Bundles of the shapes of a reduction grid, for timing on a device without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from edge.bench.layer_latencies import Shape
from edge.bench.profile import FLOOR, REST, SHAPES_NAME, ShapeSet
from edge.bundles.manifest import Manifest, Profile
from edge.datatypes import Array, TensorSpec, datatype_of
from edge.errors import Raw, UsageError
from edge.files import replaced_directory, write_durably
from export.bundle.exportable import Contents, write_contents
from export.bundle.exported import FULL, RUNTIMES
from export.bundle.tier_files import export_tier, files_of, tiers_of
from export.finetune.models import open_model
from export.models.convert import golden_of
from export.models.heads import SequenceClassifier
from export.models.transformer import Layer
from export.reduce.grid import grid_of, widest
from export.reduce.latency import feeds_of, layer_feeds, model_key, without_layers
from export.training.provenance import provenance

_LABELS = 2


class ShapesWritten(msgspec.Struct, frozen=True):
    """A directory of shapes that was written."""

    directory: str
    shapes: int
    lengths: tuple[int, ...]
    onnx_bytes: int


def write_shapes(
    source: str | Path,
    directory: str | Path,
    *,
    lengths: Sequence[int],
    runtimes: Sequence[str] = RUNTIMES,
    on_shape: Callable[[int, int], None] = lambda done, shapes: None,
) -> ShapesWritten:
    """Write each distinct shape of a model's reduction grid as a bundle with random weights.

    Args:
        source: a run of ``fewheads finetune``, or a Hugging Face directory.
        directory: written whole or not at all; what is there is replaced.
        lengths: tokens, ascending; ignored for images, which have one length.
        runtimes: of :data:`export.bundle.exported.RUNTIMES`.

    Raises:
        UsageError: a length is beyond the model's, or the disk is full.
    """
    found = open_model(source)
    torch.manual_seed(0)
    model = found.head or SequenceClassifier(found.transformer, _LABELS)
    config = model.transformer.config
    lengths = (config.max_positions,) if config.architecture == "vit" else tuple(lengths)
    if lengths[-1] > config.max_positions:
        expected = f"at most {config.max_positions}, the positions of the model"
        raise UsageError("--lengths", given=lengths[-1], expected=expected, fix="Give shorter lengths.")
    directory = Path(directory)
    grid = grid_of(config)
    shapes = grid.shapes(widest(config))
    names = [Shape.of(shape) for shape in shapes]
    writer = _Writer(lengths, runtimes, Path(source).name)
    total = len(shapes) + 2
    try:
        with replaced_directory(directory) as new:
            for done, (shape, name) in enumerate(zip(shapes, names, strict=True)):
                block = Layer(config, shape)
                writer.write(new / name.name, block, layer_feeds(config, lengths[-1]), ["y"], int8=True)
                on_shape(done + 1, total)
            writer.write(new / FLOOR, _Floor(), layer_feeds(config, lengths[-1]), ["y"])
            on_shape(total - 1, total)
            writer.write(new / REST, without_layers(model), feeds_of(config, lengths[-1]), model.outputs)
            on_shape(total, total)
            written = ShapeSet(model=model_key(config), dense=names[0], shapes=tuple(names), lengths=lengths)
            write_durably(new / SHAPES_NAME, msgspec.json.format(msgspec.json.encode(written), indent=2) + b"\n")
    except OSError as error:
        fix = "Free space, or choose another place."
        raise UsageError(f"--out {directory}", given=Raw(error), expected="room to write", fix=fix) from None
    return ShapesWritten(str(directory), len(shapes), lengths, writer.onnx_bytes)


class _Writer:
    def __init__(self, lengths: tuple[int, ...], runtimes: Sequence[str], source: str) -> None:
        self._lengths, self._runtimes, self._source = lengths, runtimes, source
        self.onnx_bytes = 0

    def write(
        self, path: Path, module: nn.Module, inputs: Mapping[str, Array], outputs: Sequence[str], *, int8: bool = False
    ) -> None:
        """Write a module as a bundle.

        Args:
            inputs: one row of the longest length; the second dimension is the tokens, except of pixels.
            int8: whether the bundle also has a tier in INT8.
        """
        tokens = {name: array.ndim < 4 for name, array in inputs.items()}
        golden = golden_of(module, inputs, outputs)
        exported = export_tier(
            module,
            golden,
            [inputs],
            name=FULL,
            dynamic={name: {1: "tokens"} if free else {} for name, free in tokens.items()},
            runtimes=self._runtimes,
            precisions=("fp32", "fp16", "int8") if int8 else ("fp32", "fp16"),
            has_head=False,
        )
        manifest = Manifest(
            name=path.name,
            version=1,
            description=f"{path.name} of the reduction grid of {self._source}, to be timed by 'fewheads profile'",
            inputs=tuple(_spec(name, array, tokens[name]) for name, array in inputs.items()),
            outputs=tuple(_spec(name, array, self._is_free(array)) for name, array in golden.outputs.items()),
            max_batch_size=0,
            profile={name: self._profile(array) for name, array in inputs.items() if tokens[name]},
            tiers=tiers_of(FULL, exported),
            golden="golden.npz",
            files={},
            provenance=provenance(trainer="none: random weights", data="random inputs", seed=0),
        )
        write_contents(Contents(manifest, {**files_of(exported), manifest.golden: golden}, predicted="never"), path)
        self.onnx_bytes += sum(len(one.data) for one in exported)

    def _is_free(self, output: Array) -> bool:
        return output.ndim > 1 and output.shape[1] == self._lengths[-1]

    def _profile(self, array: Array) -> Profile:
        low, usual, high = self._lengths[0], self._lengths[len(self._lengths) // 2], self._lengths[-1]
        rest = array.shape[2:]
        return Profile(min=(1, low, *rest), opt=(1, usual, *rest), max=(1, high, *rest))


class _Floor(nn.Module):
    """A model that only copies a layer's input: the cost of a call without computation."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return x, through one kernel."""
        return x * 2


def _spec(name: str, array: Array, free: bool) -> TensorSpec:
    shape = (1, -1, *array.shape[2:]) if free else array.shape
    return TensorSpec(name, datatype_of(array), shape)
