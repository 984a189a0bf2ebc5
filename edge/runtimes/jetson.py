"""Detection of a Jetson."""

from __future__ import annotations

from pathlib import Path


def jetson_model(root: Path = Path("/")) -> str | None:
    """Return the model name of a Jetson, and None on any other machine."""
    try:
        # The device tree ends its strings in NUL.
        model = (root / "proc/device-tree/model").read_text(errors="replace").strip("\0\n ")
    except OSError:
        model = ""
    if "jetson" in model.lower():
        return model
    # Containers often have no device tree, and NVIDIA's runtime mounts this file into them.
    return "NVIDIA Jetson" if (root / "etc/nv_tegra_release").is_file() else None
