"""The limit on keys and values: what requests reserve, refusals, and what gives it back."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from edge.errors import InvalidRequest, Overloaded, RunnerError
from edge.launch import running_server
from edge.scheduling.admission import CacheBudget
from tests.support.http_requests import ask
from tests.support.inference_service import Running, running_service
from tests.support.jobs import occupied
from tests.support.letters_model import (
    FAILING,
    MAX_TOKENS,
    NAME,
    POSITIONS,
    PROMPT,
    TEXT,
    completion,
    continued,
    text_of,
    text_request,
    write_letters_bundle,
)
from tests.support.models import write_oracle_bundle
from tests.support.sample_requests import expression

#: A key of one number, and two values of three.
TOKEN_BYTES = 4 * (1 + 2 * 3)
OWN = len(PROMPT) + MAX_TOKENS  # tokens of a request without parameters


def write(repository: Path) -> None:
    write_letters_bundle(repository / NAME)
    write_oracle_bundle(repository / "oracle")


async def unreserved(budget: CacheBudget) -> bool:
    """Wait until nothing is reserved; return False after ten seconds."""
    limit = time.monotonic() + 10
    while budget.reserved_bytes and time.monotonic() < limit:
        await asyncio.sleep(0.001)
    return not budget.reserved_bytes


async def test_a_request_beyond_what_is_left_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    budget = CacheBudget(TOKEN_BYTES * (2 * OWN + 10))
    async with running_service(tmp_path, write, cache=budget) as running:
        with occupied(running.scheduler):
            going = [asyncio.create_task(running.infer(text_request(PROMPT))) for _ in range(2)]
            await asyncio.sleep(0.01)
            message = (
                f"cache: got {TOKEN_BYTES * 11} bytes of keys and values for prompt and max_tokens, "
                f"expected at most {TOKEN_BYTES * 10}, which other requests leave. Send the request again later"
            )
            with pytest.raises(Overloaded, match=message) as refused:
                await running.infer(text_request(PROMPT, max_tokens=8))
            assert (refused.value.cause, refused.value.retry_after_ms > 0) == ("cache", True)
            with pytest.raises(Overloaded):  # each row counts
                await running.infer(text_request("ab", "ab", max_tokens=4))
            going.append(asyncio.create_task(running.infer(text_request(PROMPT, max_tokens=7))))
            going.append(asyncio.create_task(running.infer(expression(b"1 + 2"))))  # it has no keys and values
            await asyncio.sleep(0.01)
            assert budget.reserved_bytes == budget.most_bytes
        answers = await asyncio.gather(*going)
        assert [text_of(answer) for answer in answers[:3]] == [*[continued(PROMPT)] * 2, continued(PROMPT, 7)]
        assert await unreserved(budget)
        assert text_of(await running.infer(text_request(PROMPT, max_tokens=8))) == continued(PROMPT, 8)
        assert running.counted(NAME).drops == {("Overloaded", "cache"): 2}


async def test_every_end_gives_the_memory_back(tmp_path: Path) -> None:
    budget = CacheBudget(TOKEN_BYTES * POSITIONS)

    async def ends(running: Running, *prompts: str, **parameters: Any) -> None:
        await running.infer(text_request(*prompts, **parameters))

    async with running_service(tmp_path, write, cache=budget) as running:
        with pytest.raises(RunnerError):
            await ends(running, FAILING)
        assert await unreserved(budget)
        with occupied(running.scheduler):  # it waits
            waiting = asyncio.create_task(ends(running, PROMPT))
            await asyncio.sleep(0.01)
            assert budget.reserved_bytes == TOKEN_BYTES * OWN
            waiting.cancel()
        assert await unreserved(budget)
        with pytest.raises(InvalidRequest, match="parameter 'tier'"):
            await ends(running, PROMPT, tier=5)
        await ends(running, "a" * (POSITIONS - 2), max_tokens=50)  # the model ends it before
        assert await unreserved(budget)
        alone = f"prompt and max_tokens of '{NAME}': got {TOKEN_BYTES * 102} bytes of keys and values, expected at most"
        with pytest.raises(InvalidRequest, match=f"{alone} {TOKEN_BYTES * POSITIONS}, all that the server has"):
            await ends(running, "a", "b", max_tokens=50)
        assert not budget.reserved_bytes


def test_limit_of_a_server(tmp_path: Path) -> None:
    most = 1024**2 // TOKEN_BYTES
    bundle = write_letters_bundle(tmp_path / NAME, positions=2 * most)
    arguments = ["--http-port=0", "--cache-mib=1"]
    with running_server([bundle.path], target="simulated:40", cache=tmp_path, arguments=arguments) as ready:
        address, path = f"127.0.0.1:{ready.http_port}", "/v1/completions"
        with closing(http.client.HTTPConnection(address, timeout=20)) as connection:
            connection.request("POST", path, json.dumps(completion(max_tokens=most - 10, stream=True)).encode())
            stream = connection.getresponse()
            assert json.loads(stream.readline()[6:])["choices"][0]["text"] == TEXT[0]
            refused = ask(address, path, completion(max_tokens=10))
            assert (refused.status, refused.json["error"]["code"]) == (429, "rate_limit_exceeded")
            assert int(refused.headers["retry-after"]) >= 1
            assert ask(address, path, completion(max_tokens=4)).json["choices"][0]["text"] == TEXT[:4]
            stream.readline()
            assert json.loads(stream.readline()[6:])["choices"][0]["text"]  # it goes on
        assert ask(address, path, completion(max_tokens=most)).status == 400
