"""Ask a model with the stock client of Triton: ``pip install 'tritonclient[grpc]'``, and nothing of ours.

python deploy/examples/ask_tritonclient.py calculator-oracle "3 - -4 + 2" 127.0.0.1:8001
"""

from __future__ import annotations

import sys

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException


def main(model: str, question: str, server: str) -> None:
    """Print the answer."""
    with triton.InferenceServerClient(server) as client:
        tensor = triton.InferInput("expression", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[question.encode()]], dtype=np.object_))
        # client_timeout, in seconds, is gRPC's deadline; without it a call waits for ever.
        result = client.infer(model, [tensor], client_timeout=10)
        print(f"{question} = {result.as_numpy('value')[0, 0]:g}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except InferenceServerException as error:
        sys.exit(f"ask_tritonclient.py: {error.status()}: {error.message()}")
