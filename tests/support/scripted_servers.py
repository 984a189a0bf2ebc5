"""Small servers of the protocol on real sockets that answer as a test says and record the requests."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from operator import methodcaller

import grpc
import numpy as np

from edge.pb import inference_pb2 as pb
from tests.support import commands

closed_port = commands.closed_address
_serialized = methodcaller("SerializeToString")
_METHODS = {
    "ModelInfer": pb.ModelInferRequest,
    "ServerReady": pb.ServerReadyRequest,
    "RepositoryModelLoad": pb.RepositoryModelLoadRequest,
}


def doubled(request, context):
    """Return ``y``: twice the first input, which is FP32."""
    response = pb.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
    response.outputs.add(name="y", datatype="FP32", shape=request.inputs[0].shape)
    response.raw_output_contents.append((np.frombuffer(request.raw_input_contents[0], np.float32) * 2).tobytes())
    return response


def refusing(code, after_ms=None, times=10**9):
    left = iter(range(times))

    def behave(request, context):
        if next(left, None) is None:
            return doubled(request, context)
        context.set_trailing_metadata(() if after_ms is None else (("retry-after-ms", str(after_ms)),))
        return context.abort(code, "as the test says")

    return behave


def x(value=1.0):
    return {"x": np.array([value], np.float32)}


class Peer:
    """A server whose behaviour may change while it runs."""

    def __init__(self, behave):
        self.behave = behave
        self.requests = []
        self.gone = threading.Event()
        self.url = ""

    def unary(self, request, context):
        self.requests.append(request)
        context.add_callback(self.gone.set)
        return self.behave(request, context)

    def live(self, request, context):
        return pb.ServerLiveResponse(live=True)

    def stream(self, requests, context):
        for request in requests:
            self.requests.append(request)
            yield pb.ModelStreamInferResponse(infer_response=self.behave(request, context))

    def wait(self, request, context):
        """Answer only after the client has gone: a behaviour."""
        self.gone.wait(10)
        return doubled(request, context)


@contextmanager
def peer(behave=doubled, port=0):
    """Serve on loopback while the block runs; its end breaks off every call."""
    one = Peer(behave)
    server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
    unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
    handlers = {name: unary(one.unary, message.FromString, _serialized) for name, message in _METHODS.items()}
    handlers["ServerLive"] = unary(one.live, pb.ServerLiveRequest.FromString, _serialized)
    handlers["ModelStreamInfer"] = stream(one.stream, pb.ModelInferRequest.FromString, _serialized)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),))
    one.url = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    server.start()
    try:
        yield one
    finally:
        server.stop(None).wait()
