"""An ONNX graph to change."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, numpy_helper
from onnx.helper import make_node

from edge.datatypes import Array


class Graph:
    """Nodes, with what makes and what reads each tensor."""

    def __init__(self, model: ModelProto) -> None:
        self._graph = model.graph
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph.value_info
        self._shapes = {value.name: list(value.type.tensor_type.shape.dim) for value in inferred}
        self.nodes = list(model.graph.node)
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._outputs = {output.name for output in model.graph.output}
        self.index()

    def index(self) -> None:
        """Look again at what makes and reads each tensor."""
        self._makers = {name: node for node in self.nodes for name in node.output}
        self.readers: dict[str, list[NodeProto]] = {}
        for node in self.nodes:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)

    def array(self, name: str) -> Array | None:
        """Return a constant, or None."""
        found = self._constants.get(name)
        return None if found is None else numpy_helper.to_array(found)

    def rank(self, name: str) -> int:
        """Return the number of dimensions of a tensor of the given model; 0 where it is unknown."""
        return len(self._shapes.get(name, ()))

    def size(self, name: str, axis: int) -> int:
        """Return a dimension of a tensor of the given model; 0 where it is unknown."""
        return int(self._shapes[name][axis].dim_value) if self.rank(name) else 0

    def width(self, name: str) -> int:
        """Return the last dimension of a tensor of the given model; 0 where it is unknown."""
        return self.size(name, -1)

    def maker(self, name: str, *operators: str) -> NodeProto | None:
        """Return what makes a tensor, if it is one of these operators; without operators any."""
        node = self._makers.get(name)
        return node if node is not None and (node.op_type in operators or not operators) else None

    def reader(self, name: str, *operators: str) -> NodeProto | None:
        """Return the only node that reads a tensor, if it is one of these operators and no client reads it."""
        readers = self.readers.get(name, [])
        alone = len(readers) == 1 and name not in self._outputs
        return readers[0] if alone and readers[0].op_type in operators else None

    def is_output(self, name: str) -> bool:
        """Return whether clients read a tensor."""
        return name in self._outputs

    def constant(self, name: str, array: Array) -> str:
        """Add a constant and return its name."""
        while name in self._constants:
            name += ".new"
        self._constants[name] = numpy_helper.from_array(np.ascontiguousarray(array), name)
        self._graph.initializer.append(self._constants[name])
        return name

    def insert(self, before: NodeProto, operator: str, inputs: list[str], name: str, **attributes: object) -> str:
        """Add a node in front of another one, and return the name of its output."""
        while name in self._makers:
            name += ".new"
        place = next(index for index, node in enumerate(self.nodes) if node is before)
        self._makers[name] = make_node(operator, inputs, [name], name, **attributes)
        self.nodes.insert(place, self._makers[name])
        return name

    def sweep(self) -> None:
        """Drop nodes that no output needs."""
        needed, kept = set(self._outputs), []
        for node in reversed(self.nodes):
            if needed.intersection(node.output):
                needed.update(node.input)
                kept.append(node)
        self.nodes = kept[::-1]
        self.index()

    def finish(self) -> None:
        """Write the nodes into the model, without those, and without constants, that no output needs."""
        self.sweep()
        del self._graph.node[:]
        del self._graph.value_info[:]
        self._graph.node.extend(self.nodes)
        unread = self._constants.keys() - self.readers.keys() - self._outputs
        for tensor in [tensor for tensor in self._graph.initializer if tensor.name in unread]:
            self._graph.initializer.remove(tensor)
