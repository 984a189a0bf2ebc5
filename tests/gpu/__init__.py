"""``make gpu-wheels`` and ``make gpu``: check a machine with an NVIDIA GPU that has no network."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
WHEELS, ENVIRONMENT, RECORD = ROOT / ".gpu-wheels", ROOT / ".venv-gpu", ROOT / "gpu.json"

#: What the machine's own Python brings beside torch, by distribution and module. Their wheels would take 86 MiB.
IMAGE = {
    "numpy": "numpy",
    "scipy": "scipy",
    "onnx": "onnx",
    "onnxruntime": "onnxruntime",
    "ml-dtypes": "ml_dtypes",
}
