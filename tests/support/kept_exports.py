"""torch's exporter without its repetitions: a traced graph gets the weights of another model of the same structure."""

import copy
import io
import pickle
from itertools import chain

import torch
from torch.onnx._internal.exporter import _ir_passes


class KeptExports:
    """Stands for ``torch.onnx.export``: traces each structure once, and optimises the graph of each model.

    A structure is the pickled module, with the names and shapes of its weights in place of their values. What cannot be
    pickled, such as a class within a test, is exported anew, and so is what goes to a file.

    Attributes:
        export: torch's own.
    """

    def __init__(self, export):
        self.export, self._traced = export, {}

    def __call__(self, module, inputs, *to_file, input_names=None, output_names=None, **options):
        # The initializer of a tensor that modules share may have the name of any of them.
        named = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
        weights = dict(chain(*named))
        try:
            key = _structure_of(module, weights), repr(_shapes_of(inputs, options["dynamic_shapes"])), repr(options)
        except (pickle.PicklingError, AttributeError, TypeError, KeyError):
            key = None
        if key is None or to_file:
            return self.export(module, inputs, *to_file, input_names=input_names, output_names=output_names, **options)
        if key not in self._traced:
            self._traced[key] = self.export(module, inputs, **options, optimize=False).model
            for value in self._traced[key].graph.initializers.values():
                if value.name in weights:
                    value.const_value = None  # a pretrained encoder would stay in memory
        traced = self._traced[key]
        program = torch.onnx.ONNXProgram(traced.clone(), None)
        # Or the numbers in the names of new nodes would begin at 0, and the file would differ from that of an export.
        program.model.graph._name_authority = copy.deepcopy(traced.graph._name_authority)
        program.apply_weights({name: weights[name] for name in weights if name in traced.graph.initializers})
        program.optimize()  # it depends on values: equal weights become one
        _ir_passes.rename_inputs(program.model, input_names)
        _ir_passes.rename_outputs(program.model, output_names)
        return program


def _structure_of(module, weights):
    written, names = io.BytesIO(), {id(tensor): (name, tensor.dtype, tensor.shape) for name, tensor in weights.items()}
    pickler = pickle.Pickler(written)
    pickler.persistent_id = lambda value: names.get(id(value))
    pickler.dump(module)
    return written.getvalue()


def _shapes_of(inputs, dynamic):
    """Return types and shapes, except of dynamic dimensions; the exporter takes a size of 1 for a constant."""
    flat = [axes for part in dynamic for axes in (part if isinstance(part, tuple) else (part,))]
    return [
        (x.dtype, [-1 if axis in axes and size > 1 else size for axis, size in enumerate(x.shape)])
        for x, axes in zip(inputs, flat, strict=True)
    ]
