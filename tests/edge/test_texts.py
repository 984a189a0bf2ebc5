"""Embeddings and ranks over HTTP: OpenAI's, LangChain's and Cohere's clients, token ids, refusals, and neighbours."""

import base64
import json
import re
import sys
import threading
import time
from pathlib import Path

import cohere
import httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc as triton

from edge.launch import running_server
from tests.support import text_pair_model
from tests.support.commands import answer, run
from tests.support.embedder_model import MAX_BATCH_SIZE, embeddings, ids, write_embedder_bundle
from tests.support.http_requests import ask
from tests.support.letters_model import NAME as LETTERS
from tests.support.letters_model import PROMPT, continued
from tests.support.metrics import is_at_rest, wait_until
from tests.support.models import ORACLE_BUNDLE
from tests.support.sample_requests import column, triton_input

#: More than fit into a run, of all lengths, with one that is cut.
TEXTS = [
    " ".join(["good", "fine", "poor", "unknown"][: number % 4 + 1] * (number % 7 + 1))[:200] for number in range(100)
]
QUERY, DOCUMENTS = "good", ["bad bad bad", "good good", "what", "bad"]
#: The first of a pair counts for, and the second against, so the worst document is first.
LOGITS = text_pair_model.scores([(QUERY, document) for document in DOCUMENTS])[:, 0]
ORDER = [0, 3, 2, 1]


@pytest.fixture(scope="module")
def ready(tmp_path_factory, letters_bundle):
    place = tmp_path_factory.mktemp("texts")
    write_embedder_bundle(place / "embedder-1")
    text_pair_model.write_pair_bundle(place / "better-1")
    bundles = [place / "embedder-1", place / "better-1", letters_bundle.path, ORACLE_BUNDLE]
    with running_server(bundles, cache=place / "cache", arguments=["--http-port=0", "--instances=1"]) as ready:
        yield ready


@pytest.fixture
def url(ready):
    return f"127.0.0.1:{ready.http_port}"


@pytest.fixture
def stock(url):
    with openai.OpenAI(base_url=f"http://{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.mark.parametrize("form", [None, "float", "base64"])
def test_openai_gets_what_grpc_gives(ready, stock, form):
    answer = stock.embeddings.create(model="embedder", input=TEXTS, **{"encoding_format": form} if form else {})
    found = [one.embedding for one in answer.data]
    if form == "base64":  # which the client decodes only where it asks for it itself
        found = [np.frombuffer(base64.b64decode(one), "<f4") for one in found]
    np.testing.assert_allclose(found, embeddings(TEXTS), rtol=1e-6)
    assert [one.index for one in answer.data] == list(range(len(TEXTS)))
    assert (answer.object, answer.model) == ("list", "embedder")
    tokens = sum(len(ids(text)) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
    tensor = triton_input("text", column(*TEXTS[:MAX_BATCH_SIZE]))
    with triton.InferenceServerClient(f"127.0.0.1:{ready.grpc_port}") as client:
        by_grpc = client.infer("embedder", [tensor]).as_numpy("embedding")
    np.testing.assert_array_equal(np.array(found[:MAX_BATCH_SIZE], np.float32), by_grpc)


def test_a_text_alone_ids_and_fewer_dimensions(stock):
    def vectors(given, **options):
        return [one.embedding for one in stock.embeddings.create(model="embedder", input=given, **options).data]

    assert vectors("poor good") == vectors(ids("poor good")) == vectors([ids("poor good")]) == [[3, 1, 0.5]]
    assert vectors([ids("good"), ids("fine poor")]) == vectors(["good", "fine poor"])
    (cut,) = vectors("poor poor good", dimensions=2)
    np.testing.assert_allclose(cut, [1, 0], atol=1e-6)
    assert vectors("poor good", dimensions=3) == [[3, 1, 0.5]]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="LangChain is for Python 3.11 and later")
def test_langchain_embeds(url):
    from langchain_openai import OpenAIEmbeddings

    # Else it sends ids of OpenAI's own tokenizer.
    options = {"base_url": f"http://{url}/v1", "api_key": "none", "check_embedding_ctx_length": False}
    with httpx.Client() as http:
        client = OpenAIEmbeddings(model="embedder", chunk_size=64, http_client=http, **options)
        np.testing.assert_allclose(client.embed_documents(TEXTS), embeddings(TEXTS), rtol=1e-6)
        assert client.embed_query("poor good") == [3, 1, 0.5]


@pytest.mark.parametrize("kind", [cohere.Client, cohere.ClientV2])
def test_cohere_ranks(url, kind):
    asked = {"model": "better", "query": QUERY, "documents": DOCUMENTS}
    with httpx.Client() as http:
        client = kind(api_key="none", base_url=f"http://{url}", httpx_client=http)
        answer, best = client.rerank(**asked), client.rerank(**asked, top_n=2)
    assert [one.index for one in answer.results] == ORDER
    scores = [one.relevance_score for one in answer.results]
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-LOGITS[ORDER])), rtol=1e-6)
    assert [one.index for one in best.results] == ORDER[:2]


def test_text_embeddings_inference(url):
    """By its documents as it writes them; it has no client of its own."""
    assert ask(url, "/embed", {"inputs": TEXTS[:3], "truncate": True}).json == embeddings(TEXTS[:3]).tolist()
    assert ask(url, "/embed", {"inputs": "poor good"}).json == [[3, 1, 0.5]]
    asked = {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True, "return_text": True}
    expected = [{"index": index, "score": LOGITS[index], "text": DOCUMENTS[index]} for index in ORDER]
    assert ask(url, "/rerank", asked).json == expected
    assert ask(url, "/rerank", {"query": QUERY, "texts": DOCUMENTS}).json[0].keys() == {"index", "score"}
    asked = {"model": "better", "query": QUERY, "documents": [{"text": "bad"}], "return_documents": True}
    (result,) = ask(url, "/v1/rerank", asked).json["results"]
    assert result["document"] == {"text": "bad"}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="LangChain is for Python 3.11 and later")
def test_the_examples_of_the_document(url):
    page = (Path(__file__).parents[2] / "edge" / "README.md").read_text()
    page = page.partition("### Embeddings and ranks\n")[2].partition("\n##")[0]
    for ours, theirs in (("127.0.0.1:8000", url), ('"encoder"', '"embedder"'), ('"ranker"', '"better"')):
        page = page.replace(ours, theirs)
    first, second = re.findall(r"^curl .+'$", page, re.MULTILINE)
    vectors, ranks = (json.loads(answer(run(["sh", "-c", f"{command} -sS --fail"]))) for command in (first, second))
    assert [len(one["embedding"]) for one in vectors["data"]] == [3, 3]
    assert sorted(one["index"] for one in ranks) == [0, 1]
    (program,) = re.findall(r"^```python\n(.+?)^```$", page, re.MULTILINE | re.DOTALL)
    checks = "print(embeddings.embed_query('poor good'))"
    assert answer(run([sys.executable, "-W", "ignore", "-c", program + checks])) == "[3.0, 1.0, 0.5]\n"


def test_the_examples_for_users_of_other_servers(ready, url):
    page = (Path(__file__).parents[2] / "deploy" / "COMING_FROM.md").read_text()
    names = {"encoder": "embedder", "ranker": "better", "writer": LETTERS, "Once upon": PROMPT, "a dog": "good"}
    ports = {"127.0.0.1:8000": url, "127.0.0.1:8001": f"127.0.0.1:{ready.grpc_port}"}
    for ours, theirs in (names | ports).items():
        page = page.replace(ours, theirs)
    programs = re.findall(r"^```python\n(.+?)^```$", page, re.MULTILINE | re.DOTALL)
    printed = answer(run([sys.executable, "-W", "ignore", "-c", "".join(programs)]))
    text, vectors = continued(PROMPT, 5), [[2, 0, 0], [0, 2, 0]]  # of two unknown words, and of "good"
    assert printed.splitlines() == ["[[2. 0. 0.]", " [0. 2. 0.]]", text, "[2.0, 0.0, 0.0]", "[[4. 0.]", " [0. 4.]]"]
    commands = re.findall(r"^curl .+'$", page, re.MULTILINE)
    lines = answer(run(["sh", "-ec", "\n".join(f"{command} -sS --fail -w '\\n'" for command in commands)])).splitlines()
    embedded, ranked, *others = map(json.loads, lines)
    assert (embedded, len(ranked)) == (vectors, 2)
    first, completed, second, reranked = others
    assert [one["embedding"] for one in (*first["data"], *second["data"])] == [*vectors, vectors[0]]
    assert completed["choices"][0]["text"] == text
    assert [one["index"] for one in reranked["results"]] == [one["index"] for one in ranked]


def test_models_say_what_they_do(url, stock):
    assert {one["id"]: one["capabilities"] for one in ask(url, "/v1/models").json["data"]} == {
        "embedder": ["embeddings"], "better": ["rerank"], "letters": ["completions"],
    }  # fmt: skip
    assert stock.models.retrieve("better").id == "better"
    with pytest.raises(openai.NotFoundError, match=r"expected POST /v1/completions, /v1/embeddings .* not a chat"):
        stock.chat.completions.create(model="letters", messages=[{"role": "user", "content": "hello"}])


#: In place of the field that OpenAI's errors name; Cohere's have a message alone.
COHERE = "none"
EMBED, RANK = {"model": "embedder", "input": "good"}, {"model": "better", "query": "good", "documents": ["bad"]}
REFUSED = [
    ("/v1/embeddings", EMBED | {"input": []}, "input", "got 0 texts, expected 1 to 2048. Send them in"),
    ("/v1/embeddings", EMBED | {"input": ["a"] * 2049}, "input", "got 2049 texts"),
    ("/v1/embeddings", EMBED | {"input": None}, "input", "got nothing, expected a list"),
    ("/v1/embeddings", EMBED | {"input": ["good", 1]}, "input", "got a whole number among them, expected a string, a"),
    ("/v1/embeddings", EMBED | {"input": [1, "good"]}, "input", "got a string among them"),
    ("/v1/embeddings", EMBED | {"input": ["good", " "]}, "input", "got 0 tokens, expected 1 to 16. Send some text."),
    ("/v1/embeddings", EMBED | {"input": [[1], [True]]}, "input", "got true or false among them"),
    ("/v1/embeddings", EMBED | {"input": [[1], [[2]]]}, "input", "got a list among them"),
    ("/v1/embeddings", EMBED | {"input": [{}]}, "input", "got an object among them"),
    ("/v1/embeddings", EMBED | {"input": [[]]}, "input", "input of body: got 0 ids, expected 1 to 16"),
    ("/v1/embeddings", EMBED | {"input": [2] * 17}, "input", "got 17 ids"),
    ("/v1/embeddings", EMBED | {"input": [[6]]}, "input", "got 6, expected 0 to 5. Use the model's own tokenizer, or"),
    ("/v1/embeddings", EMBED | {"input": [-1]}, "input", "got -1"),
    ("/v1/embeddings", EMBED | {"input": [2**70]}, "input", "got 1180591620717411303424"),
    ("/v1/embeddings", EMBED | {"input": "good " * 100}, "input", "got 500 bytes, expected at most 200"),
    ("/v1/embeddings", EMBED | {"dimensions": 4}, "dimensions", "dimensions of body: got 4, expected 1 to 3. Leave it"),
    ("/v1/embeddings", EMBED | {"dimensions": 0}, "dimensions", "got 0"),
    ("/v1/embeddings", EMBED | {"dimensions": 1.5}, "dimensions", "got a number, expected a whole number"),
    ("/v1/embeddings", EMBED | {"encoding_format": "hex"}, "encoding_format", "got 'hex', expected float or"),
    ("/v1/embeddings", EMBED | {"dimension": 2}, None, "got 'dimension', expected one of: model, input,"),
    ("/v1/embeddings", EMBED | {"tier": "lean"}, "tier", "got 'lean'"),
    ("/v1/embeddings", {"input": "good"}, "model", "model of body: got nothing"),
    ("/v1/rerank", RANK | {"documents": []}, COHERE, "got 0 texts"),
    ("/v1/rerank", RANK | {"documents": [1]}, COHERE, "got a whole number, expected a string"),
    ("/v1/rerank", RANK | {"documents": [{"title": "bad"}]}, COHERE, "text of a document of documents of body"),
    ("/v1/rerank", RANK | {"top_n": 0}, COHERE, "got 0, expected 1 or more"),
    ("/v1/rerank", RANK | {"query": ["good"]}, COHERE, "got a list, expected a string"),
    ("/v1/rerank", RANK | {"query": "g" * 5000, "documents": ["a"] * 1000}, COHERE, "bytes with the query beside"),
]


def test_refused_bodies(url):
    for path, body, param, message in REFUSED:
        heard = ask(url, path, body)
        error = heard.json if param == COHERE else heard.json["error"]
        assert (heard.status, error.get("param", COHERE)) == (400, param), (body, error)
        assert message in error["message"], (error, message)
    for path, body, status, message in (
        ("/embed", {"inputs": "good", "truncate": False}, 400, "truncate of body: got False, expected true: texts"),
        ("/embed", {"inputs": "good", "model": "better"}, 404, "got a model without embeddings, expected one of: em"),
        ("/rerank", {"query": "good", "texts": [["bad"]]}, 400, "a text of texts of body: got a list"),
    ):
        heard = ask(url, path, body)
        assert (heard.status, message in heard.error) == (status, True), heard.body
    heard = ask(url, "/v2/rerank", RANK | {"model": "oracle"})
    assert (heard.status, "expected one of: better" in heard.json["message"]) == (404, True)


def test_many_texts_are_one_request_that_counts_for_all_of_its_runs(tmp_path):
    write_embedder_bundle(tmp_path / "embedder-1")
    arguments = ["--http-port=0", "--rate-limit=0.01:2"]
    with running_server([tmp_path / "embedder-1"], cache=tmp_path / "cache", arguments=arguments) as ready:
        url = f"127.0.0.1:{ready.http_port}"
        assert ask(url, "/embed", {"inputs": ["good"] * (2 * MAX_BATCH_SIZE + 1)}).json == [[0, 2, 0]] * 17
        refused = ask(url, "/embed", {"inputs": "good"})
        assert (refused.status, 100 < int(refused.headers["retry-after"]) <= 200) == (429, True)


def test_many_texts_have_one_deadline(tmp_path):
    """Each of their 256 runs would end in time, and all of them would take ten seconds."""
    write_embedder_bundle(tmp_path / "embedder-1")
    arguments = ["--http-port=0", "--instances=1", "--default-timeout-ms=1000"]
    with running_server(
        [tmp_path / "embedder-1"], target="simulated:40", cache=tmp_path / "cache", arguments=arguments
    ) as ready:
        url = f"127.0.0.1:{ready.http_port}"
        late = ask(url, "/embed", {"inputs": ["good"] * 2048}, timeout=60)
        assert (late.status, "before the deadline" in late.error) == (504, True), late.body
        assert wait_until(lambda: is_at_rest(ready))
        assert ask(url, "/embed", {"inputs": "good"}).json == [[0, 2, 0]]


def test_one_long_text_does_not_lengthen_the_others(tmp_path):
    """Its padding, for as many texts as are allowed, would take 256 MB."""
    longest = 8192
    write_embedder_bundle(tmp_path / "embedder-1", max_length=longest, unknown=(1, np.inf, 0))
    with running_server([tmp_path / "embedder-1"], cache=tmp_path / "cache", arguments=["--http-port=0"]) as ready:
        url = f"127.0.0.1:{ready.http_port}"
        assert ask(url, "/embed", {"inputs": [[2] * longest]}).json == [[0, 2 * longest, 0]]
        before = most_memory_bytes(ready.process_id)
        answer = ask(url, "/embed", {"inputs": [[2] * longest, *[[5]] * 2047]}, timeout=60)
        assert answer.json == [[0, 2 * longest, 0], *[[3, -1, 0.5]] * 2047]
        assert most_memory_bytes(ready.process_id) - before < 64 * 1024**2
        infinite = ask(url, "/embed", {"inputs": ["good", "what"]})  # which JSON cannot hold
        error = "output 'embedding' of 'embedder': got a NaN or an infinity, expected finite numbers"
        assert (infinite.status, error in infinite.error) == (500, True)


def most_memory_bytes(process_id):
    status = Path(f"/proc/{process_id}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def test_many_texts_leave_room_for_others(ready, url):
    """A request for as many texts as are allowed is computed in many runs, and another one comes between them."""
    many = {"model": "embedder", "input": [" ".join(["good"] * 16)] * 2048}
    answers, seconds = [], []
    thread = threading.Thread(target=lambda: answers.append(ask(url, "/v1/embeddings", many, timeout=60)))
    begun = time.perf_counter()
    thread.start()
    while thread.is_alive():
        asked = time.perf_counter()
        assert ask(url, "/embed", {"inputs": "good"}).status == 200
        seconds.append(time.perf_counter() - asked)
    assert np.median(seconds) < (time.perf_counter() - begun) / 4
    assert len(json.loads(answers[0].body)["data"]) == 2048
    assert wait_until(lambda: is_at_rest(ready))
