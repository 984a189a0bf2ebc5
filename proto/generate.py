"""Write ``edge/pb`` from the ``.proto`` files: messages and their types.

    python proto/generate.py [DIRECTORY]     the default directory is the root of the checkout

The messages go into a descriptor pool of our own. Protobuf's default pool would refuse the second definition of
``inference.ModelInferRequest``, so a process could not import both this package and ``tritonclient``.
"""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent.parent
NAMES = ("inference", "telemetry")
DEFAULT_POOL = "_descriptor_pool.Default()"


def generate(target: Path) -> None:
    """Generate all files under ``target``/edge/pb."""
    target.mkdir(parents=True, exist_ok=True)
    arguments = [
        "protoc",
        # The virtual folder makes the generated imports say edge.pb.
        f"--proto_path=edge/pb={ROOT / 'proto'}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        f"--python_out={target}",
        f"--pyi_out={target}",
        *(f"edge/pb/{name}.proto" for name in NAMES),
    ]
    if protoc.main(arguments) != 0:
        sys.exit("protoc failed")
    for name in NAMES:
        path = target / "edge" / "pb" / f"{name}_pb2.py"
        text = path.read_text()
        if text.count(DEFAULT_POOL) != 1:
            sys.exit(f"{path}: expected {DEFAULT_POOL} once; this grpcio-tools generates something else")
        text = text.replace(DEFAULT_POOL, "_POOL")
        anchor = "_sym_db = "
        path.write_text(text.replace(anchor, f"from edge.pb.pool import POOL as _POOL\n{anchor}", 1))


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
