"""Export of a head of backward attention, or of a bias, to a bundle of its own, beside the bundle of its base.

The embeddings are frozen, so that keys and values are constants. A layer becomes two thin products, whatever its
normalisation, latent projection and gate are:

    z' = z + α Σ_h softmax(z / τ_h) U_h F_h

U is the layer's values, and F = α W_Q Kᵀ / √d_h with the learnt α. The α of a request is 1 for the head as it was
trained, and 0 for the language model alone. Keys are stored as [d_h, V]: the heads are then stacked without a copy, and
one product has their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from edge.bundles.bundle import Bundle
from edge.bundles.golden import Golden, encode_npz
from edge.bundles.manifest import Manifest, Measure, Profile, Provenance, Tier
from edge.bundles.programs import GenerateProgram, HeadBase, HeadProgram
from edge.datatypes import Array, TensorSpec
from edge.errors import Raw, UsageError
from edge.programs.backward_head import HeadLayer, LogitHead
from edge.programs.program import Options
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.bundle.exportable import Contents, File, OnRows
from export.bundle.exported import FULL
from export.bundle.tier_files import checked_file
from export.generate.bundle import is_origin, origin_of
from export.generate.model import BaseIdentity
from export.models.convert import golden_of, to_onnx
from export.papers.backward.head import split_heads
from export.papers.backward.training import Head, VocabularyBias

_FILE, _TENSORS, _GOLDEN, _PART_GOLDEN = "head.onnx", "tensors.npz", "golden.npz", "head.golden.npz"
#: The inputs of the graph of a layer.
_AXES: dict[str, tuple[str, ...]] = {
    "logits": ("rows", "vocabulary"),
    "keys": ("heads", "width", "vocabulary"),
    "values": ("heads", "vocabulary", "width"),
    "temperatures": ("heads",),
    "alpha": ("rows", "one"),
}
#: The largest number of heads and their width that an engine is built for.
_MOST_HEADS, _MOST_WIDTH = 16, 1024


class Folded(NamedTuple):
    """The constants of one layer, FP32.

    Attributes:
        keys: F, [H, d_h, V].
        values: U, [H, V, d_h].
        temperatures: τ, [H]. They divide the logits.
    """

    keys: Array
    values: Array
    temperatures: Array


@torch.no_grad()
def fold(head: Head) -> tuple[Folded, ...]:
    """Return the constants of each layer; a UsageError refuses what is no sum of logits and a map of probabilities.

    A bias for each token is a layer whose values are all 1, as probabilities add up to 1.
    """
    if isinstance(head, VocabularyBias):
        ones = np.ones(len(head.bias), np.float32)
        return (Folded(head.bias.cpu().numpy()[None, None], ones[None, :, None], ones[:1]),)
    form, top_k = head.config.form, head.config.top_k
    if form != "residual" or top_k:
        given, fix = Raw(f"{form}, top_k {top_k}"), "Serve a head of this form."
        raise UsageError("form of a backward head", given=given, expected="residual, top_k 0", fix=fix)
    folded = []
    for layer, (keys, values) in zip(head.attentions, head.keys_and_values(), strict=True):
        # The keys with the query projection, as q = m W_Q multiplies them.
        keys = keys @ layer.scaled_query(torch.eye(head.config.dims, device=keys.device)).T
        keys, values = (split_heads(matrix, head.config.heads) for matrix in (keys, values))
        constants = (keys.transpose(1, 2), values, layer.temperatures)
        folded.append(Folded(*(tensor.contiguous().cpu().numpy() for tensor in constants)))
    return tuple(folded)


class FoldedHead(nn.Module):
    """One folded layer as a graph whose inputs are its constants, so that a device exchanges heads by their buffers."""

    def forward(self, logits: Tensor, keys: Tensor, values: Tensor, temperatures: Tensor, alpha: Tensor) -> Tensor:
        """Return z' [N, V].

        Args:
            logits: z, [N, V].
            keys: [H, d_h, V].
            values: [H, V, d_h].
            temperatures: [H].
            alpha: of each position, [N, 1]; 0 returns its logits unchanged.
        """
        probabilities = torch.softmax(logits / temperatures[:, None, None], dim=2)
        means = (probabilities @ values).transpose(0, 1).flatten(1)  # [N, d]
        return logits + (alpha * means) @ keys.flatten(0, 1)


class TrainedHead(NamedTuple):
    """A head of backward attention or a bias: an :class:`export.bundle.exportable.Exportable`.

    Attributes:
        base: bundle of the language model that the head was trained on.
        name: of the head's own bundle.
        identity: of that model.
    """

    head: Head
    base: Path
    name: str
    identity: BaseIdentity
    provenance: Provenance
    measures: Sequence[Measure] = ()

    def contents(self, on_rows: OnRows | None) -> Contents:
        """See :class:`export.bundle.exportable.Exportable`; no accuracy is measured.

        Raises:
            UsageError: the base generates no text or was made from another model, or :func:`fold` refuses the head.
        """
        layers = fold(self.head)
        vocabulary = layers[0].keys.shape[2]
        manifest = _base_manifest(self.base, self.identity, vocabulary)
        example, most = _example(), manifest.max_batch_size
        axes = {name: {axis: of for axis, of in enumerate(named) if of != "one"} for name, named in _AXES.items()}
        data = to_onnx(FoldedHead(), {key: torch.from_numpy(of) for key, of in example.items()}, ["moved"], axes)
        part = golden_of(FoldedHead(), example, ["moved"])
        program = HeadProgram(
            base=HeadBase(name=manifest.name, version=manifest.version, sha256=manifest.weights_sha256),
            tensors=_TENSORS,
            logits="logits",
            alpha="alpha",
            moved="moved",
            keys="keys",
            values="values",
            temperatures="temperatures",
            layers=len(layers),
        )
        sizes = {"rows": (1, 1, most), "vocabulary": (1, vocabulary, vocabulary), "one": (1, 1, 1)}
        sizes |= {"heads": (1, 1, _MOST_HEADS), "width": (1, 32, _MOST_WIDTH)}
        exported = checked_file(
            data,
            part,
            _FILE,
            "any",
            "fp32",
            role="head",
            golden=_PART_GOLDEN,
            inputs=tuple(
                TensorSpec(name, "FP32", tuple(1 if of == "one" else -1 for of in axes)) for name, axes in _AXES.items()
            ),
            outputs=(TensorSpec("moved", "FP32", (-1, -1)),),
            profile={name: Profile(*zip(*(sizes[of] for of in _AXES[name]), strict=True)) for name in _AXES},
        )
        tensors = {"logits": vocabulary, "alpha": 1}
        what = "Bias" if isinstance(self.head, VocabularyBias) else "Head of backward attention"
        made = Manifest(
            name=self.name,
            version=1,
            description=f"{what} for {manifest.name} {manifest.version}",
            inputs=tuple(TensorSpec(name, "FP32", (-1, size)) for name, size in tensors.items()),
            outputs=(TensorSpec("moved", "FP32", (-1, vocabulary)),),
            max_batch_size=most,
            profile={name: Profile(min=(1, size), opt=(1, size), max=(most, size)) for name, size in tensors.items()},
            tiers=(Tier(name=FULL, artifacts=(exported.artifact,)),),
            golden=_GOLDEN,
            files={},
            provenance=self.provenance,
            program=program,
            measures=tuple(self.measures),
        )
        constants = {
            f"{number}/{field}": array
            for number, layer in enumerate(layers)
            for field, array in layer._asdict().items()
        }
        files: dict[str, File] = {_FILE: exported, _TENSORS: encode_npz(constants)}
        files |= {_GOLDEN: _golden(program, data, layers, vocabulary), _PART_GOLDEN: part}
        return Contents(made, files)


def _base_manifest(base: Path, identity: BaseIdentity, vocabulary: int) -> Manifest:
    """Return the manifest of a base that a head fits to."""
    manifest = Bundle.open(base, models=False).manifest
    if not isinstance(manifest.program, GenerateProgram):
        given, fix = Raw("no such model"), "Export it with 'fewheads language export'."
        raise UsageError(f"base {base}", given=given, expected="a bundle that generates text", fix=fix)
    outputs = [spec for file in manifest.tiers[0].artifacts for spec in manifest.tensors(file).outputs]
    logits = next(spec for spec in outputs if spec.name == manifest.program.logits)
    if not is_origin(manifest.provenance.trainer, identity) or logits.shape[1] != vocabulary:
        given, fix = Raw(manifest.provenance.trainer), "Give a bundle of the head's own model."
        expected = f"a bundle of {origin_of(identity)} and {vocabulary} tokens"
        raise UsageError(f"base {base}", given=given, expected=expected, fix=fix)
    return manifest


def _example() -> dict[str, Array]:
    """Return random inputs of a layer of two heads."""
    random, sizes = np.random.default_rng(0), {"rows": 3, "vocabulary": 64, "heads": 2, "width": 5, "one": 1}
    shapes = {name: [sizes[of] for of in named] for name, named in _AXES.items()}
    made = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return {**made, "logits": 3 * made["logits"], "temperatures": np.exp(made["temperatures"])}


def _golden(program: HeadProgram, data: bytes, layers: Sequence[Folded], vocabulary: int) -> Golden:
    """Return random logits with several alphas, and what the head makes of them."""
    logits = 3 * np.random.default_rng(0).standard_normal((3, vocabulary)).astype(np.float32)
    inputs = {"logits": logits, "alpha": np.array([[0.0], [1.0], [0.5]], np.float32)}
    runner = OnnxRuntimeRunner(data, subject=_FILE)
    head = LogitHead(program, {FULL: runner}, [HeadLayer(*layer) for layer in layers])
    try:
        return Golden(inputs, dict(head.compute(inputs, Options(FULL)).outputs))
    finally:
        head.close()
        runner.close()
