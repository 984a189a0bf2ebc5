"""ONNX Runtime behind grpcio and nothing else: the cost of a server that only answers.

python bare.py PORT THREADS NAME=FILE...      takes raw contents, checks nothing
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
from sessions import session

sys.path.insert(0, os.environ["FEWHEADS_TREE"])
from edge.pb import inference_pb2 as pb

TYPES = {"FP32": np.float32, "INT64": np.int64}


def serve(port, threads, compute):
    """Answer with the name and the value of the output that ``compute(model, feeds)`` returns."""

    def infer(request, context):
        feeds = {
            tensor.name: np.frombuffer(raw, TYPES[tensor.datatype]).reshape(tuple(tensor.shape))
            for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        output, value = compute(request.model_name, feeds)
        response = pb.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
        response.outputs.add(name=output, datatype="FP32", shape=value.shape)
        response.raw_output_contents.append(value.tobytes())
        return response

    server = grpc.server(ThreadPoolExecutor(threads), options=[("grpc.so_reuseport", 0)])
    method = grpc.unary_unary_rpc_method_handler(
        infer, pb.ModelInferRequest.FromString, pb.ModelInferResponse.SerializeToString
    )
    service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelInfer": method})
    server.add_generic_rpc_handlers((service,))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


def main() -> None:
    sessions = {name: session(path) for name, path in (argument.split("=") for argument in sys.argv[3:])}
    outputs = {name: model.get_outputs()[0].name for name, model in sessions.items()}
    serve(
        int(sys.argv[1]),
        int(sys.argv[2]),
        lambda name, feeds: (outputs[name], sessions[name].run(None, feeds)[0]),
    )


if __name__ == "__main__":
    main()
