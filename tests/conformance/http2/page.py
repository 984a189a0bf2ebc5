"""The page of HTTP/2 conformance: ``python -m tests.conformance.http2.page`` writes it."""

from __future__ import annotations

from pathlib import Path

from tests.conformance.http2 import connection, frames, hpack, requests

TABLE = {
    "RFC 9113, sections 3 to 5 and 7: connections and streams": connection.CASES,
    "RFC 9113, section 6: frames": frames.CASES,
    "RFC 9113, section 8: requests": requests.CASES,
    "RFC 7541: HPACK": hpack.CASES,
}
CASES = [case for part in TABLE.values() for case in part]
PAGE = Path(__file__).with_name("DIFFERENCES.md")
_HEAD = """# HTTP/2 conformance of `fewheads serve --transport nghttp2`

{cases} cases of RFC 9113 and RFC 7541, which cover those that h2spec has for servers. In {same} of them the server
does exactly what the RFC asks for. The last table lists the other {others}, with the reason.
`tests/conformance/http2/test_http2_conformance.py` runs every case and checks that this page agrees with the cases.

| part | cases | differences |
| --- | --- | --- |
"""


def render() -> str:
    """Return the page."""
    others = sum(bool(case.ours) for case in CASES)
    lines = [_HEAD.format(cases=len(CASES), same=len(CASES) - others, others=others).rstrip("\n")]
    lines += [f"| {title} | {len(part)} | {sum(bool(case.ours) for case in part)} |" for title, part in TABLE.items()]
    lines += ["", "| section | the client sends | RFC | Fewheads | why |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {case.section} | {case.what} | `{case.rfc}` | `{case.ours}` | {case.reason} |"
        for case in CASES
        if case.ours
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())
