"""Cases about shared memory."""

import struct
import time
from pathlib import Path

import numpy as np

from edge.pb import inference_pb2 as pb
from tests.conformance.peer import Case, call, flat, memory, outcome, slow, steps, values
from tests.support.sample_requests import in_region

_SIZE = 64
_NUMBERS = np.arange(_SIZE // 4, dtype=np.float32)


def _register(path, size=_SIZE, offset=0, name="region"):
    key = f"/{path.name}" if isinstance(path, Path) else path
    return call("SystemSharedMemoryRegister", name=name, key=key, offset=offset, byte_size=size)


def _unregister(name=""):
    return call("SystemSharedMemoryUnregister", name=name)


def _with_region(ask, size=_SIZE, offset=0):
    """Run an action with a region of 64 bytes, 0 to 15 as FP32."""

    def run(peer):
        with memory(_NUMBERS.tobytes()) as path:
            registered = _register(path, size, offset)(peer)
            try:
                return ask(peer, path) if registered == "OK" else f"register {registered}"
            finally:
                _unregister()(peer)

    return run


def _registering(*regions):
    """Register regions of one object by size, offset and name."""

    def run(peer):
        with memory(_NUMBERS.tobytes()) as path:
            answer = steps(*(_register(path, *region) for region in regions))(peer)
            _unregister()(peer)
            return answer

    return run


def _input(size, offset=0, region="region", elements=2):
    message = pb.ModelInferRequest(model_name="flat")
    in_region(message.inputs.add(name="x", datatype="FP32", shape=[elements]), region, size, offset or None)
    return message


def _typed_too():
    message = _input(8)
    message.inputs[0].contents.fp32_contents.extend([1.0, 2.0])
    return message


def _output(size, offset=0, region="region"):
    message = flat(8.5, 9.5)
    in_region(message.outputs.add(name="x_out"), region, size, offset or None)
    return message


def _infer(message, view=None):
    return _with_region(lambda peer, _: outcome(lambda: peer.send("ModelInfer", message), view))


def _written(message):
    """The contents of shared memory after an output, and its parameters in the response."""

    def ask(peer, path):
        response = peer.send("ModelInfer", message)
        parameters = response.outputs[0].parameters
        names = {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in parameters.items()}
        entries = [len(entry) for entry in response.raw_output_contents]
        return f"{np.frombuffer(path.read_bytes(), np.float32)[:5].tolist()} {sorted(names.items())} raw {entries}"

    return _with_region(ask)


def _status(peer, path):
    def read(response):
        return str([(r.name, r.key == f"/{path.name}", r.offset, r.byte_size) for r in response.regions.values()])

    return call("SystemSharedMemoryStatus", view=read, name="region")(peer)


def _while_in_use(peer, path):
    message = slow(400)
    in_region(message.outputs.add(name="steps_out"), "region", 8)
    flying = peer.infer(message)
    time.sleep(0.03)
    gone = _unregister("region")(peer)
    answer = outcome(flying.result)
    written = struct.unpack_from("<q", path.read_bytes())[0] == 400
    return f"unregister {gone}, the request {answer}, written: {written}"


def _case(name, action, expected="", text=""):
    return Case(f"shared memory: {name}", action, expected, text)


def _refused(name, action, text, expected="INVALID_ARGUMENT"):
    return _case(name, action, expected, text)


_WHOLE = (_SIZE, 0, "region")
_LARGER = "got 72 bytes from 0 on, expected a part of the 64 bytes of region 'region'"
_CUDA = "CUDA's shared memory: "
_CUDA_REGION = call("CudaSharedMemoryRegister", name="a", raw_handle=b"1", byte_size=8)
CASES = [
    _case("a part of an object", _registering((32, 16, "region"))),
    _case("register twice", _registering(_WHOLE, _WHOLE), "OK, ALREADY_EXISTS", "a name that is taken"),
    _refused("more than the object has", _registering((65, 0, "region")), "got 65 bytes from 0 on, expected at most"),
    _refused("offset beyond the object", _registering((8, _SIZE, "region")), "got 8 bytes from 64 on"),
    _refused("offset that overflows", _registering((8, 2**64 - 4, "region")), f"got 8 bytes from {2**64 - 4} on"),
    _refused("0 bytes", _registering((0, 0, "region")), "got 0 bytes, expected 1 or more"),
    _case("no name", _registering((_SIZE, 0, "")), text="got '', expected 1 to 255 bytes"),
    _case("no such object", _register("/zz-not-there"), text="zz-not-there"),
    _case("no key", _register(""), text="got '', expected the name of an object"),
    _case("a key with a path", _register("/../etc/passwd", 8), text="'/../etc/passwd', expected the name"),
    _case("register, empty message", call("SystemSharedMemoryRegister"), text="region name: got ''"),
    _case("status", _with_region(_status), "OK: [('region', True, 0, 64)]"),
    _case("status with an offset", _with_region(_status, 32, 16)),
    _refused("status, unknown region", call("SystemSharedMemoryStatus", name="zz"), "got 'zz', expected", "NOT_FOUND"),
    _case("unregister an unknown region", _unregister("zz"), "OK"),
    _case("unregister all", _unregister(), "OK"),
    _case("an input", _infer(_input(8), values), "OK: x_out=[0.0, 1.0]"),
    _case("an input with an offset", _infer(_input(8, 16), values), "OK: x_out=[4.0, 5.0]"),
    _refused("an input of an unknown region", _infer(_input(8, region="zz")), "'zz'", "NOT_FOUND"),
    _refused("an input beyond the region", _infer(_input(8, _SIZE - 4)), "got 8 bytes from 60 on, expected a part of"),
    _refused("an input larger than the region", _infer(_input(_SIZE + 8, elements=_SIZE // 4 + 2)), _LARGER),
    _refused("a negative offset", _infer(_input(8, -8)), "got 8 bytes from -8 on"),
    _refused("an offset that overflows", _infer(_input(8, 2**63 - 4)), f"got 8 bytes from {2**63 - 4} on"),
    _refused("a negative size", _infer(_input(-8)), "got -8 bytes from 0 on"),
    _refused("more bytes than the shape says", _infer(_input(12)), "got 12 raw bytes, expected 8 for FP32 [2]"),
    _refused("typed contents too", _infer(_typed_too()), "shared memory and typed contents"),
    _case("an output", _written(_output(8))),
    _case("an output with an offset", _written(_output(8, 8))),
    _case("more room than the output needs", _written(_output(16))),
    _case("an output too large", _infer(_output(4)), text="got 4 bytes, expected at least 8"),
    _refused("an output beyond the region", _infer(_output(8, _SIZE - 4)), "got 8 bytes from 60 on"),
    _refused("an output of an unknown region", _infer(_output(8, region="zz")), "'zz'", "NOT_FOUND"),
    _case("unregister while an output is on its way", _with_region(_while_in_use)),
    Case(f"{_CUDA}status", call("CudaSharedMemoryStatus", view=lambda r: len(r.regions)), "OK: 0"),
    Case(f"{_CUDA}register", _CUDA_REGION, text="CUDA IPC"),
    Case(f"{_CUDA}unregister", call("CudaSharedMemoryUnregister", name="a"), "OK"),
]
