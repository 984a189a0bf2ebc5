"""Requests for generated text: streams and single answers, limits, bad input, unloading and metrics."""

import asyncio
import http.client
import json
import re
from contextlib import closing

import numpy as np
import pytest

from edge.errors import InvalidRequest, ModelNotReady, Overloaded, RunnerError
from edge.instruments.metrics import ModelNow
from edge.launch import running_server
from edge.scheduling.admission import CacheBudget
from edge.serving.call import MESSAGE
from edge.telemetry.metrics import families
from edge.telemetry.telemetry import request_metrics
from tests.support.http_requests import ask
from tests.support.in_process import running_service
from tests.support.jobs import occupied
from tests.support.letters_blocks import write_letters_in_blocks
from tests.support.letters_model import (
    BYTES,
    FAILING,
    MAX_BATCH_SIZE,
    MAX_TOKENS,
    NAME,
    POSITIONS,
    PROMPT,
    TEXT,
    completion,
    continued,
    ids_request,
    spelt,
    text_of,
    text_request,
    write_letters_bundle,
)
from tests.support.loop_model import NAME as LOOP
from tests.support.loop_model import loop_request, write_halving_bundle
from tests.support.metrics import reached, rendered
from tests.support.models import ORACLE, write_oracle_bundle
from tests.support.sample_requests import expression

SPELT, LONGER, BLOCKS = "spelt", "longer", "blocks"


@pytest.fixture
async def running(tmp_path):
    def write(repository):
        write_letters_bundle(repository / NAME)
        write_letters_bundle(repository / SPELT, SPELT, spelling=BYTES)
        # Longer than its graph allows:
        write_letters_bundle(repository / LONGER, LONGER, failing="", positions=2 * POSITIONS)
        write_letters_in_blocks(repository / BLOCKS, BLOCKS)
        write_halving_bundle(repository / LOOP)
        write_oracle_bundle(repository / "oracle")

    async with running_service(tmp_path, write) as running:
        yield running


class Stream:
    """A request for partial answers, whose reader takes them at once, or ``late``, after the last answer."""

    def __init__(self, running, *prompts, late=False, model=NAME, **parameters):
        request = text_request(*prompts, stream_partial=True, **parameters)
        request.model_name = model
        self._service, self._late = running.service, late
        self._parts = []
        self._end = asyncio.get_running_loop().create_future()
        reader = (lambda: None) if late else self._take
        call = running.service.start(request, None, self._end.set_result, MESSAGE, reader)
        self.call = call

    async def texts(self):
        """Return the texts of all answers, the last one included; raise its error."""
        end = await self._end
        if self._late:
            self._take()
        if isinstance(end, Exception):
            raise end
        return [*self._parts, text_of(end)]

    def _take(self):
        while part := self._service.partial(self.call):
            self._parts.append(text_of(part))


async def test_texts_of_a_stream_add_up_to_the_text(running):
    ways = [
        {}, {"late": True}, {"max_tokens": 1}, {"max_tokens": 60}, {"max_tokens": 60, "late": True}, {"stop": "oc"},
        {"temperature": 1.0, "seed": 3, "top_k": 4, "max_tokens": 40}, {"temperature": 1.0, "seed": 4, "late": True},
    ]  # fmt: skip
    for model, spelling in ((NAME, {}), (SPELT, BYTES), (BLOCKS, {})):
        streams = [Stream(running, "abc", model=model, **how) for how in ways]
        for how, stream in zip(ways, streams, strict=True):
            request = text_request("abc", **{name: value for name, value in how.items() if name != "late"})
            request.model_name = model
            parts = await stream.texts()
            assert "".join(parts) == text_of(await running.infer(request))
        whole = spelt(continued("abc", 60), spelling).decode()
        assert "".join(await Stream(running, "abc", model=model, max_tokens=60).texts()) == whole


async def test_a_stream_repeats_nothing_after_a_failure_beside_it(running, caplog):
    for how in ({}, {"temperature": 1.0, "top_k": 3, "ignore_eos": True}):  # without a seed, too
        with occupied(running.scheduler):
            streams = [Stream(running, "abc", model=LONGER, max_tokens=40, late=late, **how) for late in (False, True)]
            breaking = Stream(running, "ab" * 47, model=LONGER)
        for stream in streams:
            text = "".join(await stream.texts())
            sampling = stream.call.options.sampling
            seed = {} if sampling.seed is None else {"seed": sampling.seed}
            alone = text_request("abc", max_tokens=40, **how, **seed)
            alone.model_name = LONGER
            assert text == text_of(await running.infer(alone))
        with pytest.raises(InvalidRequest):
            await breaking.texts()
        assert "failed; each begins anew, alone" in caplog.text
        caplog.clear()


async def test_each_of_many_requests_gets_its_own_text(running):
    random = np.random.default_rng(2)
    requests = []
    for number in range(60):
        letters = random.choice(list("abcefil"), (2, int(random.integers(1, 30))))
        prompts = ["".join(row) for row in letters[: int(random.integers(1, 3))]]
        drawn = {"temperature": 1.5, "seed": number} if number % 2 else {}
        requests.append(text_request(*prompts, max_tokens=int(random.integers(1, 40)), **drawn))

    async def answer(request):
        try:
            return (await running.infer(request)).raw_output_contents
        except RunnerError as error:
            return str(error)

    alone = [await answer(request) for request in requests]
    assert 5 < sum(isinstance(one, str) for one in alone) < 40  # they reach a letter without logits
    for _ in range(3):
        assert await asyncio.gather(*map(answer, requests)) == alone
    assert await running.at_rest(NAME)


async def test_cancelled_stream_leaves_and_an_unloaded_model_ends_its_texts(running):
    with occupied(running.scheduler):
        cancelled, going = Stream(running, "abc", max_tokens=90), Stream(running, "ab", max_tokens=90)
        unload = asyncio.create_task(running.control.unload_model(NAME))
        await asyncio.sleep(0.01)
        running.service.cancel(cancelled.call)
        assert not unload.done()
        with pytest.raises(ModelNotReady):
            await running.infer(text_request("abc"))
    assert "".join(await going.texts()) == continued("ab", 90)
    await asyncio.wait_for(unload, 20)
    assert running.counted(NAME).failures["Cancelled"] == 1
    await running.control.load_model(NAME)
    assert text_of(await running.infer(text_request("abc"))) == continued("abc")


async def test_bad_input_is_refused(running):
    mask = "input 'mask' of 'letters': got another mask, expected ones, at least one, and then zeros in each row. Put"
    good = ids_request([[1, 2], [3, 0]], [[1, 1], [1, 0]])
    assert len((await running.infer(good)).outputs) == 2
    for request, message in (
        (text_request("a" * POSITIONS), f"text in input 'prompt': got {POSITIONS} tokens, expected 1 to 99. Shorten"),
        (text_request(""), "text in input 'prompt': got 0 tokens, expected 1 to 99. Send some text."),
        (text_request("ab", ""), "text in input 'prompt': got 0 tokens"),
        (text_request(b"a\xff"), "'prompt'"),
        (text_request("a" * 1001), "text in input 'prompt': got 1001 bytes, expected at most 1000"),
        (text_request(*"a" * (MAX_BATCH_SIZE + 1)), "batch of 'letters': got 5 rows, expected at most 4. Split"),
        (text_request("a", temprature=1.0), "parameter name: got 'temprature', expected 'temperature'"),
        (text_request("a", max_loops=3), "'max_loops' of 'letters': got 3, expected none: the model is not a loop"),
        (text_request("a", stream_partial=True), "parameter 'stream_partial': expected a request in a stream"),
        (ids_request([[1, 2], [3, 0]], [[1, 1], [0, 0]]), mask),  # in a form that is known
        (ids_request([[1, 2, 3]], [[1, 0, 1]]), mask),
        (ids_request([[1, 2, 3]], [[1, 2, 0]]), mask),
        (ids_request([[1]], [[2**40]]), mask),
        (ids_request(np.ones((1, POSITIONS)), np.ones((1, POSITIONS))), "input 'ids' shape of 'letters': got [1, 100]"),
    ):
        with pytest.raises(InvalidRequest, match=re.escape(message)):
            await running.infer(request)
    assert await running.at_rest(NAME)
    for other, model, message in (
        (expression(b"1 + 2"), ORACLE, "expected none: the model generates no text. Leave it out."),
        (loop_request(1, max_loops=3), LOOP, "expected none: the model generates no text"),
        (loop_request(1), LOOP, "expected none: the model generates no text"),
    ):
        other.parameters["temperature"].double_param = 0.5
        with pytest.raises(
            InvalidRequest, match=re.escape(f"parameter 'temperature' of {model!r}: got 0.5, {message}")
        ):
            await running.infer(other)


async def test_requests_are_counted_by_tokens_and_end(running):
    assert running.model(NAME).program.cache_bytes
    assert running.model(LOOP).program.cache_bytes is None
    for request in (
        text_request("abc", "sh"),  # twelve tokens, and the end
        text_request("ab", max_tokens=1),
        text_request("abc", stop="x"),
    ):
        await running.infer(request)
    for failing in (FAILING, "m"):  # the first token of its text, and the third
        with pytest.raises(RunnerError):
            await running.infer(text_request(failing))
    now = ModelNow("m", "1", running.counted(NAME), cache_bytes=896)
    page = rendered(families([now])).replace('model="m",', "").replace(',version="1"', "")
    for line in (
        'fewheads_prompt_tokens_total{tier="full"} 10.0',
        'fewheads_generated_tokens_total{tier="full"} 17.0',
        'fewheads_first_token_seconds_count{tier="full"} 3.0',
        'fewheads_token_seconds_count{tier="full"} 3.0',
        'fewheads_token_seconds_bucket{le="5e-06",tier="full"} 1.0',  # a single token has no time between two
        'fewheads_text_ends_total{stopped="length",tier="full"} 2.0',
        'fewheads_text_ends_total{stopped="stop",tier="full"} 1.0',
        'fewheads_cache_bytes{model="m",version="1"} 896.0',
    ):
        assert line in page.splitlines() + rendered(families([now])).splitlines()
    telemetry = {metric.name for metric in request_metrics(running.counted(NAME))}
    assert {"fewheads_generated_tokens_total", "fewheads_first_token_seconds_count"} <= telemetry
    assert running.counted(NAME).failures == {"RunnerError": 2}
    assert running.repository.find(NAME, "").statistics.runs()["full"].requests == 3


#: A key of one number, and two values of three.
TOKEN_BYTES = 4 * (1 + 2 * 3)
OWN = len(PROMPT) + MAX_TOKENS  # tokens of a request without parameters


def write(repository):
    write_letters_bundle(repository / NAME)
    write_oracle_bundle(repository / "oracle")


async def unreserved(budget):
    await reached(lambda: not budget.reserved_bytes)


async def test_a_request_beyond_what_is_left_is_refused_and_the_others_go_on(tmp_path):
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
        await unreserved(budget)
        assert text_of(await running.infer(text_request(PROMPT, max_tokens=8))) == continued(PROMPT, 8)
        assert running.counted(NAME).drops == {("Overloaded", "cache"): 2}


async def test_every_end_gives_the_memory_back(tmp_path):
    budget = CacheBudget(TOKEN_BYTES * POSITIONS)

    async def ends(running, *prompts, **parameters):
        await running.infer(text_request(*prompts, **parameters))

    async with running_service(tmp_path, write, cache=budget) as running:
        with pytest.raises(RunnerError):
            await ends(running, FAILING)
        await unreserved(budget)
        with occupied(running.scheduler):  # it waits
            waiting = asyncio.create_task(ends(running, PROMPT))
            await asyncio.sleep(0.01)
            assert budget.reserved_bytes == TOKEN_BYTES * OWN
            waiting.cancel()
        await unreserved(budget)
        with pytest.raises(InvalidRequest, match="parameter 'tier'"):
            await ends(running, PROMPT, tier=5)
        await ends(running, "a" * (POSITIONS - 2), max_tokens=50)  # the model ends it before
        await unreserved(budget)
        alone = f"prompt and max_tokens of '{NAME}': got {TOKEN_BYTES * 102} bytes of keys and values, expected at most"
        with pytest.raises(InvalidRequest, match=f"{alone} {TOKEN_BYTES * POSITIONS}, all that the server has"):
            await ends(running, "a", "b", max_tokens=50)
        assert not budget.reserved_bytes


def test_limit_of_a_server(tmp_path):
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
