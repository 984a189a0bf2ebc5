"""The differences from Triton as a page: ``python -m tests.conformance.differences`` writes it."""

from __future__ import annotations

from pathlib import Path

from tests.conformance import control, inferences, metadata, shared_memory, streams

TABLE = {
    "Server and models": metadata.CASES,
    "Inference": inferences.CASES,
    "Streams": streams.CASES,
    "Shared memory": shared_memory.CASES,
    "Model control": control.CASES,
}
CASES = [case for part in TABLE.values() for case in part]
PAGE = Path(__file__).with_name("DIFFERENCES.md")
_HEAD = """# Where Fewheads differs from Triton

{cases} cases, run against a real Triton 2.51 (the binary of the `nvidia-pytriton` 0.7.0 wheel, with its Python backend
on a CPU) and against each gRPC transport of Fewheads, with models of the same inputs, outputs and bounds. In {same} the
outcome is the same; these are the other {others}. `make conformance` runs the cases against Triton again, once
`deploy/peers/install.sh triton` has installed it; `make test` runs them against Fewheads, and checks this page.

Fewheads runs with `--model-control explicit --allow-shared-memory --allow-log-settings --no-admission`, because Triton
allows all of this by default. Without these options, Fewheads returns UNIMPLEMENTED.
"""


def render() -> str:
    """Return the page."""
    others = sum(bool(case.ours) for case in CASES)
    lines = [_HEAD.format(cases=len(CASES), same=len(CASES) - others, others=others)]
    for title, part in TABLE.items():
        lines += [f"## {title}", "", "| case | Triton | Fewheads | why |", "| --- | --- | --- | --- |"]
        for case in part:
            if case.ours:
                cells = (case.name, f"`{case.triton}`", f"`{case.ours}`", case.reason)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(render())
