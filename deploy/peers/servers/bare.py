"""grpcio and ONNX Runtime with nothing between: what a server costs that does nothing but answer.

python bare.py PORT THREADS NAME=FILE...      takes raw contents, checks nothing
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import onnxruntime

sys.path.insert(0, os.environ["FEWHEADS_TREE"])
from edge.pb import inference_pb2 as pb

TYPES = {"FP32": np.float32, "INT64": np.int64}


def main() -> None:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    sessions = {
        name: onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        for name, path in (argument.split("=") for argument in sys.argv[3:])
    }

    def infer(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        feeds = {
            tensor.name: np.frombuffer(raw, TYPES[tensor.datatype]).reshape(tuple(tensor.shape))
            for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        session = sessions[request.model_name]
        (value,) = session.run(None, feeds)
        response = pb.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
        response.outputs.add(name=session.get_outputs()[0].name, datatype="FP32", shape=value.shape)
        response.raw_output_contents.append(value.tobytes())
        return response

    server = grpc.server(ThreadPoolExecutor(int(sys.argv[2])), options=[("grpc.so_reuseport", 0)])
    method = grpc.unary_unary_rpc_method_handler(
        infer, pb.ModelInferRequest.FromString, pb.ModelInferResponse.SerializeToString
    )
    service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelInfer": method})
    server.add_generic_rpc_handlers((service,))
    server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
