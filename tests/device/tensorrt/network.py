"""Network definitions: tensors and the layers between them."""

from __future__ import annotations

from typing import Any

from .enums import DataType, Dims, GatherMode, LayerType, NetworkDefinitionCreationFlag
from .versions import VERSION, Native, integer, setting


class ITensor(Native):
    """A tensor of a network; -1 stands for a dimension that is known at run time only."""

    name = setting("")
    dtype = setting(DataType.FLOAT) if VERSION < (11,) else property(lambda self: self._dtype)
    shape = setting(Dims())
    is_network_input = property(lambda self: self._input)
    _input = _output = _constant = False
    _dimension_names: tuple[str, ...] = ()

    def get_dimension_name(self, index: int) -> str | None:
        return self._dimension_names[integer(index)] or None if index < len(self._dimension_names) else None


class ILayer(Native):
    """One layer of a network."""

    name = setting("")
    type = property(lambda self: self._type)
    num_inputs = property(lambda self: len(self._inputs))
    num_outputs = property(lambda self: len(self._outputs))

    def get_input(self, index: int) -> Any:
        return self._inputs[index]

    def get_output(self, index: int) -> Any:
        return self._outputs[index]


class IGatherLayer(ILayer):
    """A layer that reads a table. A network returns it as :class:`ILayer`, until its class is set to this one."""

    axis = setting(0)
    mode = setting(GatherMode.DEFAULT)


class INetworkDefinition(Native):
    """A network, which the parser fills."""

    name = setting("Unnamed Network 0")
    num_layers = property(lambda self: len(self._layers))
    num_inputs = property(lambda self: len(self._inputs))
    num_outputs = property(lambda self: len(self._outputs))

    def get_flag(self, flag: Any) -> bool:
        return bool(self._flags >> int(flag) & 1)

    def get_layer(self, index: int) -> Any:
        return self._layers[index]

    def get_input(self, index: int) -> Any:
        return self._inputs[index]

    def get_output(self, index: int) -> Any:
        return self._outputs[index]

    @property
    def _strongly_typed(self) -> bool:
        # The only typing of TensorRT 11, whose network has no weakly typed kind.
        return not hasattr(NetworkDefinitionCreationFlag, "EXPLICIT_BATCH") or self.get_flag(
            NetworkDefinitionCreationFlag.STRONGLY_TYPED
        )

    def _add(self, kind: str, name: str, inputs: list[Any], outputs: list[Any], operator: str = "") -> Any:
        # TensorRT 10.3 reshapes where later versions have layers of their own.
        found = getattr(LayerType, kind, LayerType.SHUFFLE)
        layer = ILayer._make(_name=name, _type=found, _inputs=inputs, _outputs=outputs, _operator=operator)
        self._layers.append(layer)
        return layer


def new_network(log: Any, flags: int) -> Any:
    """Return an empty network."""
    return INetworkDefinition._make(_log=log, _flags=flags, _layers=[], _inputs=[], _outputs=[], _model=None)
