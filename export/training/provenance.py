"""Origin of weights, as recorded in a run directory and its bundle."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import msgspec

from edge import __version__
from edge.bench.conditions import cpu_name
from edge.bundles.manifest import Provenance
from edge.instruments.sensors import read_text

_PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "numpy")


def provenance(*, trainer: str, data: str, seed: int | None) -> Provenance:
    """Return the provenance of weights that are made now; ``trainer`` and ``data`` are descriptions for people."""
    return Provenance(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        trainer=trainer,
        data=data,
        seed=seed,
        git_commit=_git_commit(),
        versions=versions(),
    )


def versions() -> dict[str, str]:
    """Return the versions of the packages that train and convert models."""
    return {"fewheads": __version__, **{package: version(package) for package in _PACKAGES}}


def _git_commit() -> str | None:
    """Return the commit that this source is, with ``-dirty`` after it if it was changed; None outside a checkout."""
    # ls-files first: an installed copy may be inside of another checkout, whose commit is irrelevant.
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


#: The kernel's description of the processors.
CPUINFO = Path("/proc/cpuinfo")
_LONGEST_BYTES = 2**22
#: Features by the flags of x86 and Arm that announce them.
_FLAGS = {
    "AVX2": {"avx2"},
    "AVX-512": {"avx512f"},
    "VNNI": {"avx512_vnni", "avx_vnni"},
    "I8MM": {"i8mm"},
    "BF16": {"avx512_bf16", "amx_bf16", "bf16"},
    "AMX": {"amx_tile"},
}


class Processor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The processor that a run was made on.

    Attributes:
        features: of AVX2, AVX-512, VNNI, I8MM, BF16 and AMX, those that it has; None where the kernel lists no flags.
    """

    name: str
    features: tuple[str, ...] | None = None

    @property
    def described(self) -> str:
        """The features in words."""
        return "not recorded" if self.features is None else ", ".join(self.features) or "none"


def described(processors: Iterable[Processor | None]) -> tuple[str, ...]:
    """Return each distinct processor with its features, in words; None is one that was not recorded."""
    words = {f"{one.name} ({one.described})" if one else "not recorded" for one in processors}
    return tuple(sorted(words))


def processor() -> Processor:
    """Return the processor of this machine."""
    return Processor(cpu_name(), features_of(read_text(CPUINFO, _LONGEST_BYTES)))


def cores() -> int:
    """Return the physical cores that this process may use, with the limit of its container."""
    siblings = {
        read_text(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")) or str(cpu)
        for cpu in os.sched_getaffinity(0)
    }
    quota, _, period = read_text(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    limit = int(quota) // int(period) if quota.isdigit() and period.isdigit() else len(siblings)
    return max(1, min(len(siblings), limit))


def features_of(cpuinfo: str) -> tuple[str, ...] | None:
    """Return the features in the text of ``/proc/cpuinfo``; None where it has no line of flags."""
    for line in cpuinfo.splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):  # x86, Arm
            present = set(flags.split())
            return tuple(feature for feature, announced in _FLAGS.items() if present & announced)
    return None
