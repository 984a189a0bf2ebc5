"""Heads beside a model that generates text: mixed requests, loading and unloading, refusals, OpenAI's fields."""

import asyncio
import io
import json

import numpy as np
import pytest
from click.testing import CliRunner

from edge.__main__ import cli
from edge.bundles.bundle import Bundle, write_bundle
from edge.bundles.golden import decode_npz, encode_npz
from edge.cli.doctor import bundle_checks
from edge.errors import InvalidRequest, ModelNotReady, NotFound
from edge.launch import running_server
from edge.serving.call import MESSAGE
from tests.support.commands import mistake, shown
from tests.support.http_requests import ask
from tests.support.in_process import running_service
from tests.support.jobs import occupied
from tests.support.letters_blocks import write_letters_in_blocks
from tests.support.letters_model import (
    NAME,
    PROMPT,
    completion,
    continued,
    ids_request,
    text_of,
    text_request,
    write_letters_bundle,
    write_letters_head,
)
from tests.support.models import ORACLE, write_oracle_bundle

ONE, TWO, STALE, OTHER, WEAK = "plus-one", "plus-two", "stale", "other-letters", 0.001
MOVED = continued(PROMPT, shift=1)


@pytest.fixture
async def running(tmp_path):
    def write(repository):
        base = write_letters_bundle(repository / NAME, failing="")
        write_letters_head(repository / ONE, base, ONE, 1)
        write_letters_head(repository / TWO, base, TWO, 2, usual_alpha=WEAK)
        write_letters_bundle(repository / OTHER, OTHER)
        trained_before = write_letters_bundle(tmp_path / "earlier", failing="y")
        write_letters_head(repository / STALE, trained_before, STALE, 1)
        write_oracle_bundle(repository / ORACLE)

    async with running_service(tmp_path, write) as running:
        yield running


async def test_each_request_of_a_batch_has_its_own_head(running):
    ways = [
        ({}, 0),
        ({"head": ONE}, 1),
        ({"head": TWO, "alpha": 1}, 2),
        ({"head": TWO}, 0),  # its own alpha is too weak
    ]
    with occupied(running.scheduler):
        answers = [asyncio.create_task(running.infer(text_request(PROMPT, **how))) for how, _ in ways]
        await asyncio.sleep(0.01)
    texts = [text_of(answer) for answer in await asyncio.gather(*answers)]
    assert texts == [continued(PROMPT, shift=shift) for _, shift in ways]
    batches = running.counted(NAME).batches
    assert batches[len(ways)].count > 5, batches
    # A head that moves nothing leaves the draws as they are.
    drawn = {"temperature": 1.0, "seed": 3}
    still = text_request(PROMPT, head=ONE, alpha=0, **drawn)
    assert text_of(await running.infer(still)) == text_of(await running.infer(text_request(PROMPT, **drawn)))


async def test_a_head_of_a_decoder_in_blocks_is_of_all_its_files(tmp_path):
    def write(repository):
        base = write_letters_in_blocks(repository / NAME)
        write_letters_head(repository / ONE, base, ONE, 1)
        trained_before = write_letters_in_blocks(tmp_path / "earlier", failing="y")  # in its last block
        write_letters_head(repository / STALE, trained_before, STALE, 1)

    async with running_service(tmp_path, write) as running:
        assert text_of(await running.infer(text_request(PROMPT, head=ONE))) == MOVED
        with pytest.raises(InvalidRequest, match="expected a head of letters 1 with the same weights"):
            await running.infer(text_request(PROMPT, head=STALE))


async def test_an_unloaded_head_closes_after_its_last_text(running):
    head = running.model(ONE)
    with occupied(running.scheduler):
        text = asyncio.create_task(running.infer(text_request(PROMPT, head=ONE)))
        other = asyncio.create_task(running.infer(text_request(PROMPT)))
        await asyncio.sleep(0.01)
        unload = asyncio.create_task(running.control.unload_model(ONE))
        await asyncio.sleep(0.01)
        assert not unload.done()
        assert head.use.users == 1
        with pytest.raises((ModelNotReady, NotFound), match=f"head '{ONE}'"):
            await running.infer(text_request(PROMPT, head=ONE))
    assert (text_of(await text), text_of(await other)) == (MOVED, continued(PROMPT))
    await asyncio.wait_for(unload, 20)
    assert (head.use.users, head.use.take()) == (0, False)


async def test_a_head_unloaded_within_a_text_moves_it_to_its_end(running):
    end, first = asyncio.get_running_loop().create_future(), asyncio.Event()
    request = text_request(PROMPT, head=ONE, max_tokens=90, stream_partial=True)
    call = running.service.start(request, None, end.set_result, MESSAGE, first.set)
    await first.wait()
    await asyncio.wait_for(running.control.unload_model(ONE), 20)
    parts = [answer.outputs["text"].item().decode() for answer in (*(call.partials or ()), call.answer)]
    assert "".join(parts) == continued(PROMPT, 90, shift=1)
    assert (await end).parameters["stopped"].string_param == "length"


async def test_loading_and_unloading_take_effect_on_the_same_bytes(running):
    ids = [[1, 2, 3]]
    request = ids_request(ids, np.ones_like(ids), head=ONE)
    for _ in range(2):
        assert [text_of(await running.infer(request)) for _ in range(2)] == [MOVED] * 2  # the second has a known form
        await running.control.unload_model(ONE)
        with pytest.raises(NotFound, match=f"head '{ONE}': got one that is not loaded, expected a loaded one"):
            await running.infer(request)
        await running.control.load_model(ONE)
    # Another head under the same name takes over.
    write_letters_head(running.directory / f"{ONE}-2", Bundle.open(running.directory / NAME), ONE, 5, version=2)
    await running.control.load_model(ONE)
    assert text_of(await running.infer(request)) == continued(PROMPT, shift=5)
    for version, shift in ((1, 1), (2, 5)):
        named = text_request(PROMPT, head=f"{ONE}:{version}")
        assert text_of(await running.infer(named)) == continued(PROMPT, shift=shift)
    with pytest.raises(NotFound, match=f"head '{ONE}:3': got '3', expected one of: 1, 2. Leave the version out"):
        await running.infer(text_request(PROMPT, head=f"{ONE}:3"))
    assert await running.at_rest(ONE)


async def test_wrong_heads_are_refused(running):
    for model, parameters, error, message in (
        (NAME, {"head": "none"}, NotFound, "head 'none': got a name that no bundle has, expected one of: calculator"),
        (NAME, {"head": ORACLE}, InvalidRequest, f"got '{ORACLE}', no head, expected a head of letters 1 with"),
        (NAME, {"head": f"{ONE}:new"}, InvalidRequest, f"head '{ONE}:new': got 'new', expected a positive integer"),
        (OTHER, {"head": ONE}, InvalidRequest, f"got '{ONE}', a head of letters 1, expected a head of {OTHER} 1"),
        (
            NAME,
            {"head": STALE},
            InvalidRequest,
            "a head of letters 1, expected a head of letters 1 with the same weights",
        ),
        (NAME, {"alpha": 2}, InvalidRequest, "parameter 'alpha': got 2, expected a 'head' beside it. Name a head"),
        (
            NAME,
            {"head": ONE, "alpha": float("nan")},
            InvalidRequest,
            "'alpha' of 'letters': got nan, expected -1000 to 1000. 1 is",
        ),
    ):
        request = text_request(PROMPT, **parameters)
        request.model_name = model
        with pytest.raises(error, match=message):
            await running.infer(request)
    assert await running.at_rest(NAME)


def test_doctor_and_bench_take_a_head(head, tmp_path):
    (check,) = bundle_checks(head.path, "onnxruntime", tmp_path)
    assert (check.name, check.status) == (f"{ONE} full head", "ok"), check
    (report,) = json.loads(shown("bench", head.path, "--requests", 10, "--rows", 2, "--json"))
    assert (report["in_process"]["count"], report["served"]["count"]) == (10, 10)


def test_malformed_tensors_are_refused(head, tmp_path):
    files = {name: head.read(name) for name in head.manifest.files}
    layer = decode_npz(files["tensors.npz"], "tensors")
    compressed = io.BytesIO()
    np.savez_compressed(compressed, **layer)
    for number, (tensors, found) in enumerate(
        (
            (compressed.getvalue(), "member '0/keys.npy': compressed"),
            (files["tensors.npz"][:-9], "zip"),
            (encode_npz({"0/keys": layer["0/keys"]}), "tensors.npz: ['0/keys']"),
            (encode_npz({**layer, "0/values": layer["0/values"][:, :5]}), "[[1, 27, 27], [1, 5, 27], [1]]"),
            (encode_npz({**layer, "0/keys": np.float32("nan") * layer["0/keys"]}), "layer 0"),
            (encode_npz({**layer, "0/temperatures": -layer["0/temperatures"]}), "layer 0"),
        )
    ):
        bundle = write_bundle(tmp_path / str(number), head.manifest, {**files, "tensors.npz": tensors})
        (check,) = bundle_checks(bundle.path, "onnxruntime", tmp_path)
        assert (check.status, found in check.found) == ("failed", True), check


@pytest.fixture(scope="module")
def head(letters_bundle, tmp_path_factory):
    return write_letters_head(tmp_path_factory.mktemp("head") / ONE, letters_bundle, ONE, 1)


@pytest.fixture(scope="module")
def server(letters_bundle, head):
    with running_server([letters_bundle.path, head.path], arguments=["--http-port=0"]) as ready:
        yield ready


def test_heads_of_completions(server):
    def complete(**fields):
        return ask(f"127.0.0.1:{server.http_port}", "/v1/completions", completion(max_tokens=12, **fields))

    def text(**fields):
        return str(complete(**fields).json["choices"][0]["text"])

    assert [text(head=ONE), text(head=ONE, alpha=WEAK), text(head="")] == [MOVED, *[continued(PROMPT)] * 2]
    events = complete(head=ONE, alpha=1, stream=True).body.decode().split("\n\n")[:-2]
    assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in events) == MOVED
    for fields, status, param in (
        ({"head": "none"}, 404, "head"),
        ({"head": 5}, 400, "head"),
        ({"head": NAME}, 400, "head"),
        ({"alpha": 1}, 400, "alpha"),
        ({"head": ONE, "alpha": "much"}, 400, "alpha"),
    ):
        heard = complete(**fields)
        assert (heard.status, heard.json["error"]["param"]) == (status, param), heard.json


def test_heads_of_the_command(server):
    command = ["infer", "--url", f"127.0.0.1:{server.grpc_port}", NAME, PROMPT]
    for options, expected in ((["--head", ONE], MOVED), (["--head", ONE, "--alpha", "-0.001"], continued(PROMPT))):
        assert json.loads(shown(*command, *options, "--json"))["outputs"]["text"] == [[expected]]
        streamed = CliRunner().invoke(cli, [*command, *options, "--stream"], catch_exceptions=False)
        assert streamed.stdout == f"{expected}\n"
    assert "parameter 'alpha': got 2.0, expected a 'head' beside it" in mistake(*command, "--alpha", 2, code=7)
