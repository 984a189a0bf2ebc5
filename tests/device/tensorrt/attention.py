"""Fusion of attention, by the rules that NVIDIA documents and those that TensorRT-RTX follows.

Documented for SM 7.5 and later: products in FP16 or BF16 with heads of 16 to 256 features, or in INT8 with heads of
16, 32 or 64 features and at most 512 tokens. Measured with TensorRT-RTX: queries and values need the same number of
features; anything but a cast or a reshape between the softmax and the second product prevents fusion, and so does a
slice of queries or keys.
"""

from .native import DataType, LayerType

_SCALE_AND_MASK = {LayerType.ELEMENTWISE, LayerType.SHUFFLE, LayerType.CAST, LayerType.SELECT}
_FREE = {LayerType.SHUFFLE, LayerType.CAST, LayerType.IDENTITY}
_QUANTIZATION = {LayerType.QUANTIZE, LayerType.DEQUANTIZE}
_INT8_HEADS, _INT8_TOKENS = (16, 32, 64), 512
_MIN_HEAD, _MAX_HEAD = 16, 256
_OPERANDS = 4  # of the two products


def fused_attention(network, half, max_tokens):
    """Return the names of the softmax layers whose attention becomes one kernel.

    Args:
        network: the parsed network.
        half: whether FP32 layers may compute in FP16, as with weak typing.
        max_tokens: the longest sequence of any profile.
    """
    producers = {id(tensor): layer for layer in network._layers for tensor in layer._outputs}
    consumers = {}
    for layer in network._layers:
        for tensor in layer._inputs:
            consumers.setdefault(id(tensor), []).append(layer)

    def before(layer):
        return [producers[id(tensor)] for tensor in layer._inputs if id(tensor) in producers]

    def after(layer):
        return [consumer for tensor in layer._outputs for consumer in consumers.get(id(tensor), [])]

    found = []
    for softmax in (layer for layer in network._layers if layer.type == LayerType.SOFTMAX):
        scores = _product(softmax, before, _SCALE_AND_MASK | _QUANTIZATION)
        heads = _product(softmax, after, _FREE | _QUANTIZATION)
        if scores and heads and _fits(scores, heads, before, half, max_tokens):
            found.append(softmax.name)
    return found


def _fits(scores, heads, before, half, max_tokens):
    query, value = scores.get_input(0), heads.get_output(0)
    size = query.shape[-1]
    sources = [_behind_reshapes(layer, before) for product in (scores, heads) for layer in before(product)]
    if size != value.shape[-1] or any(layer._operator == "Slice" for layer in sources):
        return False
    if len(sources) == _OPERANDS and all(layer.type == LayerType.DEQUANTIZE for layer in sources):
        return size in _INT8_HEADS and max_tokens <= _INT8_TOKENS
    types = {DataType.HALF, DataType.BF16} | ({DataType.FLOAT} if half else set())
    return query.dtype in types and value.dtype in types and _MIN_HEAD <= size <= _MAX_HEAD


def _behind_reshapes(layer, before):
    while layer.type == LayerType.SHUFFLE and before(layer):
        layer = before(layer)[0]
    return layer


def _product(start, neighbours, passed):
    queue, seen = neighbours(start), set()
    while queue:
        layer = queue.pop(0)
        if layer.type == LayerType.MATRIX_MULTIPLY:
            return layer
        if layer.type in passed and id(layer) not in seen:
            seen.add(id(layer))
            queue += neighbours(layer)
    return None
