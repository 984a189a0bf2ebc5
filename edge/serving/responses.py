"""Builds the response of a request from the answer of its job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from edge.datatypes import DATATYPES, WIRE_TYPES, Array, datatype_of
from edge.errors import Raw, RunnerError
from edge.instruments.nonfinite import NonfiniteWarnings
from edge.pb import inference_pb2 as pb
from edge.repository.model import Model
from edge.scheduling.job import Answer
from edge.serving.call import largest_classes
from edge.serving.shared_memory import Window, describe
from edge.serving.wire import to_raw

#: Elements whose texts are written in a few milliseconds.
_INLINE_ELEMENTS: Final = 4096


class ResponseBuilder:
    """Builds responses, and logs a warning for outputs that hold a NaN or an infinity."""

    def __init__(self) -> None:
        self._warnings = NonfiniteWarnings()

    def slow(self, model: Model, answer: Answer, classes: Mapping[str, int]) -> bool:
        """Return whether the texts of a response take milliseconds, so that no event loop may build it."""
        sizes = [array.size for array in answer.outputs.values() if array.dtype.kind == "O"]
        sizes += [answer.outputs[made.reads].size for made in model.made.values() if made.output.datatype == "BYTES"]
        sizes += [answer.outputs[name if name in answer.outputs else model.made[name].reads].size for name in classes]
        return sum(sizes) > _INLINE_ELEMENTS

    def build(
        self,
        model: Model,
        answer: Answer,
        names: Sequence[str],
        *,
        request_id: str,
        tier: str,
        windows: Mapping[str, Window],
        classes: Mapping[str, int] = MappingProxyType({}),
    ) -> pb.ModelInferResponse:
        """Return the response, its outputs in the order of ``names``; no label is made of a NaN or an infinity.

        Of the outputs in ``classes``, it has so many of the largest values, as texts.
        """
        response = pb.ModelInferResponse(model_name=model.name, model_version=model.version, id=request_id)
        outputs = dict(answer.outputs) if model.made or classes else answer.outputs
        if answer.nonfinite:  # in any output of the graph: the logits of a label may not be sent
            self._warnings.found(model.name, tier, answer.nonfinite)
        for name, made in model.made.items():
            if name in names:
                if made.reads in answer.nonfinite and (made.output.datatype == "BYTES" or name in classes):
                    raise _no_order(model, name, made.reads)
                outputs[name] = made.compute(outputs[made.reads])
        for name, count in classes.items():
            if name in answer.nonfinite:
                raise _no_order(model, name, name)
            rows = len(outputs[name]) if model.manifest.max_batch_size else 0
            outputs[name] = largest_classes(outputs[name], count, model.labels.get(name, ()), rows)
        encode_outputs(response, outputs, names, windows)
        return response


def _no_order(model: Model, name: str, reads: str) -> RunnerError:
    return RunnerError(
        f"output {name!r} of {model.name!r}",
        given=Raw(f"a NaN or an infinity in {reads!r}"),
        expected="finite logits to choose a label from",
        fix=f"Request {reads!r} alone to see them; usual causes are inputs out of range and FP16.",
    )


def encode_outputs(
    response: pb.ModelInferResponse,
    outputs: Mapping[str, Array],
    names: Iterable[str],
    windows: Mapping[str, Window] | None = None,
) -> None:
    """Add the named outputs to a response, each with exactly one raw entry.

    C++ clients index ``raw_output_contents`` without a check, so an output in shared memory has an empty entry.
    """
    for name in names:
        array = outputs[name]
        datatype = DATATYPES.get(array.dtype)
        if datatype:
            raw = array.astype(WIRE_TYPES[datatype], copy=False).tobytes()
        else:  # text, or of another byte order
            datatype = datatype_of(array)
            raw = to_raw(array, datatype)
        tensor = response.outputs.add(name=name, datatype=datatype, shape=array.shape)
        window = windows.get(name) if windows else None
        if window:
            window.write(raw)
            describe(tensor, window, len(raw))
        response.raw_output_contents.append(b"" if window else raw)
