"""From the outputs of a run to the response, whatever way the request took."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from edge.datatypes import Array
from edge.instruments.nonfinite import NonfiniteWarnings, nonfinite
from edge.pb import inference_pb2 as pb
from edge.repository.model import Model
from edge.serving.shared_memory import Window
from edge.serving.wire import encode_outputs


class Made(NamedTuple):
    """A response, and whether any output of the model holds a NaN or an infinity."""

    response: pb.ModelInferResponse
    nonfinite: bool


class Answers:
    """Makes responses, and warns of those that hold a NaN or an infinity."""

    def __init__(self) -> None:
        self._warnings = NonfiniteWarnings()

    def make(
        self,
        model: Model,
        outputs: dict[str, Array],
        names: Iterable[str],
        *,
        request_id: str,
        tier: str,
        windows: Mapping[str, Window] | None = None,
    ) -> Made:
        """Make a response.

        Args:
            model: who answers.
            outputs: of its graph.
            names: what the client asked for, in its order.
            request_id: the client's.
            tier: which computed it.
            windows: where outputs go that shall be in shared memory.

        Raises:
            InvalidRequest: an output does not fit into its shared memory.
        """
        response = pb.ModelInferResponse(model_name=model.name, model_version=model.version, id=request_id)
        encode_outputs(response, model.complete(outputs), names, windows)
        bad = nonfinite(outputs)  # all of them: a label or a score may have been made of what is not sent
        if bad:
            self._warnings.found(model.name, tier, bad)
        return Made(response, bool(bad))
