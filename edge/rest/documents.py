"""Requests for embeddings and ranks as clients of three APIs write them, and the documents that answer them."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from edge.datatypes import Array
from edge.errors import InvalidRequest, Raw
from edge.rest.json_messages import checked, encode, encode_parts, field, given_fields, kind_of
from edge.serving.request import check_name

#: More texts than this are refused; OpenAI has the same limit.
MOST_TEXTS: Final = 2048
SEVERAL: Final = "Send them in several requests."
_FORMATS: Final = ("float", "base64")
_OPENAI: Final = ("model", "input", "encoding_format", "dimensions", "user", "tier")
_EMBED: Final = ("model", "inputs", "normalize", "truncate", "dimensions", "tier")
_RERANK: Final = ("model", "query", "texts", "raw_scores", "return_text", "truncate", "tier")
_COHERE: Final = ("model", "query", "documents", "top_n", "return_documents", "tier")
#: All fields, for errors that name one.
FIELDS: Final = {*_OPENAI, *_EMBED, *_RERANK, *_COHERE}


class Embeddings(NamedTuple):
    """A request for the embeddings of some texts, or of the ids of their tokens.

    Attributes:
        model: empty for the only one.
        field: that has the texts.
        dimensions: so many numbers of each, of length 1; None for all, as the model gives them.
        form: of the answer, ``float``, ``base64``, or ``plain``: lists without a document around them.
        parameters: of the requests to infer.
    """

    model: str
    field: str
    texts: list[Any]
    dimensions: int | None
    form: str
    parameters: dict[str, Any]

    def check(self, dimensions: int) -> None:
        """Raise an InvalidRequest if more numbers are asked for than the model gives."""
        if self.dimensions is not None and not 1 <= self.dimensions <= dimensions:
            expected, fix = f"1 to {dimensions}", "Leave it out for all."
            raise InvalidRequest("dimensions of body", given=self.dimensions, expected=expected, fix=fix)

    def body(self, values: Array, tokens: int, model: str) -> bytes:
        """Return the body of the response."""
        if self.dimensions is not None and self.dimensions < values.shape[1]:
            values = values[:, : self.dimensions]
            values = values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        if self.form == "plain":
            return encode_parts([row.tolist()] for row in values)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        head = encode({"object": "list", "model": model, "usage": usage})[:-1]
        return b'%b,"data":%b}' % (head, encode_parts([document] for document in self._documents(values)))

    def _documents(self, values: Array) -> Iterator[dict[str, Any]]:
        for index, row in enumerate(values):
            numbers = row.tolist() if self.form == "float" else base64.b64encode(row.astype("<f4").tobytes()).decode()
            yield {"object": "embedding", "index": index, "embedding": numbers}


class Ranking(NamedTuple):
    """A request to rank some texts for a query.

    Attributes:
        model: empty for the only one.
        field: that has the texts.
        most: so many of the best are returned; None for all.
        raw: scores are the model's, not their sigmoids.
        with_texts: whether the texts are returned, too.
        cohere: whether the answer has Cohere's form, not that of Text Embeddings Inference.
        parameters: of the requests to infer.
    """

    model: str
    field: str
    query: str
    texts: list[str]
    most: int | None
    raw: bool
    with_texts: bool
    cohere: bool
    parameters: dict[str, Any]

    def body(self, scores: Array, tokens: int, model: str) -> bytes:
        """Return the body of the response: the best first."""
        order = np.argsort(-scores, kind="stable")[: self.most].tolist()
        if not self.raw:
            scores = np.exp(-np.logaddexp(0, -scores.astype(np.float64)))
        results = [self._result(index, float(scores[index])) for index in order]
        if not self.cohere:
            return encode(results)
        about = {"id": str(uuid.uuid4()), "model": model, "usage": {"total_tokens": tokens}}
        return encode({**about, "results": results, "meta": {"api_version": {"version": "1"}}})

    def _result(self, index: int, score: float) -> dict[str, Any]:
        result: dict[str, Any] = {"index": index, "relevance_score" if self.cohere else "score": score}
        if self.with_texts:
            text = {"text": self.texts[index]}
            result |= {"document": text} if self.cohere else text
        return result


def openai_embeddings(document: Mapping[str, Any]) -> Embeddings:
    """Return what a body of OpenAI's API asks for; an InvalidRequest refuses a field that is wrong or unknown."""
    given = given_fields(document, _OPENAI)
    field(given, "user", str, default="")
    form = field(given, "encoding_format", str, default="float")
    if form not in _FORMATS:
        expected = " or ".join(_FORMATS)
        raise InvalidRequest("encoding_format of body", given=form, expected=expected, fix="Choose one of these.")
    return Embeddings(
        _model(given, required=True), "input", _inputs(given, "input"), _dimensions(given), form, _parameters(given)
    )


def embed(document: Mapping[str, Any]) -> Embeddings:
    """Return what a body of ``/embed`` asks for, as :func:`openai_embeddings`."""
    given = given_fields(document, _EMBED)
    _only_true(given, "truncate", "texts that are too long are cut")
    _only_true(given, "normalize", "embeddings are as the model gives them, most of length 1")
    return Embeddings(
        _model(given), "inputs", _inputs(given, "inputs"), _dimensions(given), "plain", _parameters(given)
    )


def rerank(document: Mapping[str, Any]) -> Ranking:
    """Return what a body of ``/rerank`` asks for, as :func:`openai_embeddings`."""
    given = given_fields(document, _RERANK)
    _only_true(given, "truncate", "texts that are too long are cut")
    raw, with_texts = (field(given, name, bool, default=False) for name in ("raw_scores", "return_text"))
    texts = [checked(text, str, "a text of texts of body") for text in _list(given, "texts")]
    query = field(given, "query", str)
    return Ranking(_model(given), "texts", query, texts, None, raw, with_texts, False, _parameters(given))


def cohere_rerank(document: Mapping[str, Any]) -> Ranking:
    """Return what a body of Cohere's API asks for, as :func:`openai_embeddings`."""
    given = given_fields(document, _COHERE)
    texts = []
    for one in _list(given, "documents"):
        subject = "a document of documents of body"
        texts.append(checked(field(one, "text", str, subject) if isinstance(one, dict) else one, str, subject))
    most = checked(given["top_n"], int, "top_n of body") if "top_n" in given else None
    if most is not None and most < 1:
        raise InvalidRequest("top_n of body", given=most, expected="1 or more", fix="Leave it out for all.")
    with_texts, query = field(given, "return_documents", bool, default=False), field(given, "query", str)
    name, parameters = _model(given, required=True), _parameters(given)
    return Ranking(name, "documents", query, texts, most, False, with_texts, True, parameters)


def _model(given: Mapping[str, Any], *, required: bool = False) -> str:
    name = field(given, "model", str) if required else field(given, "model", str, default="")
    check_name("model of body", name)
    return name


def _parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    return {"tier": field(given, "tier", str)} if "tier" in given else {}


def _dimensions(given: Mapping[str, Any]) -> int | None:
    return checked(given["dimensions"], int, "dimensions of body") if "dimensions" in given else None


def _only_true(given: Mapping[str, Any], name: str, reason: str) -> None:
    if not field(given, name, bool, default=True):
        raise InvalidRequest(f"{name} of body", given=False, expected=f"true: {reason}", fix="Leave it out.")


def _list(given: Mapping[str, Any], name: str) -> list[Any]:
    values: list[Any] = field(given, name, list)
    if not 1 <= len(values) <= MOST_TEXTS:
        texts, expected = Raw(f"{len(values)} texts"), f"1 to {MOST_TEXTS}"
        raise InvalidRequest(f"{name} of body", given=texts, expected=expected, fix=SEVERAL)
    return values


def _inputs(given: Mapping[str, Any], name: str) -> list[Any]:
    """Return texts, or lists of ids, of a text, the ids of one, or a list of either."""
    value = given.get(name)
    ids = isinstance(value, list) and bool(value) and type(value[0]) is int
    values = [value] if isinstance(value, str) or ids else _list(given, name)
    kind = type(values[0])
    for one in values:
        parts = one if isinstance(one, list) else []
        if kind not in (str, list) or type(one) is not kind or any(type(token) is not int for token in parts):
            wrong = next((token for token in parts if type(token) is not int), one)
            expected = "a string, a list of strings, the ids of a text's tokens, or a list of such ids"
            given_kind, fix = Raw(f"{kind_of(wrong)} among them"), "Send one of these."
            raise InvalidRequest(f"{name} of body", given=given_kind, expected=expected, fix=fix)
    return values
