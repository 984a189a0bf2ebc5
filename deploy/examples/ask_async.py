"""Send a model many requests at once with asyncio, each with a time limit.

python deploy/examples/ask_async.py calculator-oracle 127.0.0.1:8001 "3 - -4 + 2" "1 + 1" ...
"""

from __future__ import annotations

import asyncio
import sys

from edge.client import text
from edge.client.aio import AsyncClient
from edge.errors import FewheadsError, ServerError


async def main(model: str, server: str, *questions: str) -> None:
    """Print the answer or the error of each question."""
    async with AsyncClient(server) as client:
        calls = [client.infer(model, {"expression": text([each])}, timeout_seconds=2) for each in questions]
        # Cancelling a task cancels its call at the server too.
        for question, answer in zip(questions, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(answer, ServerError):
                print(f"{question} = {answer.code} after {answer.attempts} attempts")
            elif isinstance(answer, BaseException):
                raise answer
            else:
                print(f"{question} = {answer.outputs['value'][0, 0]:g}")


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except FewheadsError as error:
        sys.exit(f"ask_async.py: {error}")
