"""OpenAI's completions: a request as requests to infer, and the responses to them as its documents."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from edge.datatypes import Array
from edge.errors import InvalidRequest, Raw
from edge.programs.generate import PROMPT_TOKENS
from edge.programs.generated_text import Pieces
from edge.programs.sampling import MOST_STOPS
from edge.protocol import BY_STOP, LOGPROBS, STOPPED, STREAM_PARTIAL, TOKEN_IDS
from edge.rest.json_messages import INT64, checked, encode, encode_parts, field, kind_of, parameters_of, whole
from edge.serving.call import InferResponse
from edge.serving.request import InputTensor, RequestedOutput, UncheckedRequest, check_name
from edge.serving.text_models import TextGenerator

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: More choices than this are refused.
MOST_CHOICES: Final = 256
#: What OpenAI documents for requests that set neither.
_DEFAULTS: Final = {"max_tokens": 16, "temperature": 1.0}
_INTEGERS: Final = ("max_tokens", "min_tokens", "top_k", "seed")
_NUMBERS: Final = ("temperature", "top_p", "alpha")
#: Fields without effect here, and the value of each that asks for none.
_NEUTRAL: Final[dict[str, object]] = {
    "echo": False,
    "suffix": "",
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
}
_OTHERS: Final = ("ignore_eos", "head", "stop", "logprobs", "n", "best_of", "stream", "stream_options", "user")
#: As many tokens with their log-probabilities are written in two milliseconds or so.
_INLINE_TOKENS: Final = 1024
FIELDS: Final = ("model", "prompt", *_INTEGERS, *_NUMBERS, *_OTHERS, *_NEUTRAL)


class Completion(NamedTuple):
    """A request for the texts that follow some prompts, given as texts or as ids of tokens.

    There are ``n`` choices for each prompt, with their tokens if ``logprobs``; the last event of a stream has the
    numbers of tokens if ``include_usage``.
    """

    model: str
    prompts: list[str | list[int]]
    n: int
    parameters: dict[str, Any]
    stream: bool
    include_usage: bool
    logprobs: bool


def completion_of(document: Mapping[str, Any]) -> Completion:
    """Return what a body asks for; raise an InvalidRequest for a field that is wrong, or asks for what is not there."""
    given = {name: value for name, value in document.items() if value is not None}
    for name in given.keys() - set(FIELDS):
        known = ", ".join(FIELDS)
        raise InvalidRequest("field of body", given=name, expected=f"one of: {known}", fix="Correct or remove it.")
    for name in _NEUTRAL.keys() & given.keys():
        _check_neutral(name, given[name])
    field(given, "user", str, default="")
    parameters: dict[str, Any] = dict(_DEFAULTS)
    parameters |= {name: checked(given[name], int, f"{name} of body") for name in _INTEGERS if name in given}
    parameters |= {name: _number(given[name], f"{name} of body") for name in _NUMBERS if name in given}
    if field(given, "ignore_eos", bool, default=False):
        parameters["ignore_eos"] = True
    if head := field(given, "head", str, default=""):
        check_name("head of body", head)
        parameters["head"] = head
    if stops := _stops(given.get("stop", [])):
        parameters["stop"] = encode(stops).decode()
    stream = field(given, "stream", bool, default=False)
    if stream:
        parameters[STREAM_PARTIAL] = True
    options = field(given, "stream_options", dict, default={})
    if "stream_options" in given and not stream:
        what, fix = Raw("stream false"), "Set stream to true, or leave them out."
        raise InvalidRequest("stream_options of body", given=what, expected="stream true", fix=fix)
    for name in options.keys() - {"include_usage"}:
        raise InvalidRequest("field of stream_options", given=name, expected="include_usage", fix="Remove it.")
    usage = field(options, "include_usage", bool, "stream_options", default=False)
    prompts, logprobs = _prompts(given.get("prompt")), _logprobs(given.get("logprobs"))
    n = _choices(given, len(prompts))
    check_name("model of body", model := field(given, "model", str))
    return Completion(model, prompts, n, parameters, stream, usage, logprobs)


def _choices(given: Mapping[str, Any], prompts: int) -> int:
    n = checked(given.get("n", 1), int, "n of body")
    most = MOST_CHOICES // prompts
    if not 1 <= n <= most:
        raise InvalidRequest("n of body", given=n, expected=f"1 to {most}", fix="Ask for fewer choices at once.")
    best_of = checked(given.get("best_of", n), int, "best_of of body")
    if best_of != n:
        expected = f"{n}, as many as n: all choices are returned"
        raise InvalidRequest("best_of of body", given=best_of, expected=expected, fix="Leave it out.")
    return n


def _logprobs(value: object) -> bool:
    if value is None:
        return False
    if checked(value, int, "logprobs of body") not in (0, 1):
        expected = "0 or 1: the likeliest other tokens are not offered"
        raise InvalidRequest("logprobs of body", given=value, expected=expected, fix="Ask for the chosen tokens.")
    return True


def _check_neutral(name: str, value: object) -> None:
    neutral = _NEUTRAL[name]
    if value == neutral and (type(value) is bool) == (type(neutral) is bool):
        return
    given = value if isinstance(value, bool | int | float | str) else Raw(kind_of(value))
    expected = f"{encode(neutral).decode()}, the only value that is offered"
    raise InvalidRequest(f"{name} of body", given=given, expected=expected, fix="Leave it out.")


def _number(value: object, subject: str) -> float:
    return value if type(value) is int else checked(value, float, subject)


def _stops(value: object) -> list[str]:
    texts = value if isinstance(value, list) else [value]
    if len(texts) > MOST_STOPS:
        given = Raw(f"{len(texts)} texts")
        raise InvalidRequest("stop of body", given=given, expected=f"at most {MOST_STOPS}", fix="Give fewer texts.")
    what = "a text of stop of body" if isinstance(value, list) else "stop of body"
    return [checked(text, str, what) for text in texts]


def _prompts(value: object) -> list[str | list[int]]:
    several = isinstance(value, list) and not (value and type(value[0]) is int)
    prompts: list[Any] = value if several else [value]  # type: ignore[assignment]
    if not 1 <= len(prompts) <= MOST_CHOICES:
        given, fix = Raw(f"{len(prompts)} prompts"), "Send them in several requests."
        raise InvalidRequest("prompt of body", given=given, expected=f"1 to {MOST_CHOICES}", fix=fix)
    for prompt in prompts:
        ids = prompt if isinstance(prompt, list) else [] if isinstance(prompt, str) else [prompt]
        if wrong := [kind_of(token) for token in ids if type(token) is not int or token is prompt]:
            expected, fix = "a string, ids of tokens, or a list of such prompts", "Send it in one of these forms."
            raise InvalidRequest("prompt of body", given=Raw(wrong[0]), expected=expected, fix=fix)
    return prompts


class Choices:
    """The choices of one completion: each is the response to a request of its own."""

    def __init__(self, completion: Completion, model: TextGenerator) -> None:
        self._completion, self._model = completion, model
        self._count = len(completion.prompts) * completion.n
        self._id, self._created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self._prompt_tokens = self._generated = 0
        self._spellings = [_Spelling(model.tokenizer) for _ in range(self._count)] if completion.logprobs else []

    def requests(self) -> Iterator[UncheckedRequest]:
        """Yield a request for each choice, when it is needed; raise an InvalidRequest for a prompt that is too long."""
        completion = self._completion
        for number in range(self._count):
            prompt, choice = divmod(number, completion.n)
            if not choice:
                common = self._common(completion.prompts[prompt])
            request = common._replace(id=f"{self._id}-{number}")
            if choice and "seed" in completion.parameters:  # draws of its own
                seed = (completion.parameters["seed"] + choice) % 2**63
                request = request._replace(parameters={**request.parameters, "seed": seed})
            yield request

    def choice(self, response: InferResponse, final: bool) -> dict[str, Any]:
        """Return the choice that a response belongs to, with its text; count the tokens of a final response."""
        tensors, names = response.outputs, self._model
        number, reason = int(response.id.rpartition("-")[2]), None
        if final:
            parameters = response.parameters()
            if number % self._completion.n == 0:  # once for all choices of a prompt
                self._prompt_tokens += parameters[PROMPT_TOKENS]
            self._generated += tensors[names.generated].item()
            reason = "stop" if parameters[STOPPED] == BY_STOP else "length"
        text = tensors[names.text].item().decode()
        spelt = self._spellings[number].spell(tensors) if self._spellings else None
        return {"text": text, "index": number, "logprobs": spelt, "finish_reason": reason}

    def document(self, choices: list[dict[str, Any]], **more: object) -> dict[str, Any]:
        """Return a body, or an event, with some choices."""
        about = {"id": self._id, "object": "text_completion", "created": self._created}
        return {**about, "model": self._completion.model, "choices": choices, **more}

    @property
    def slow(self) -> bool:
        """Whether :meth:`body` takes milliseconds, so that no event loop may write it."""
        return bool(self._spellings) and self._generated > _INLINE_TOKENS

    def body(self, choices: list[dict[str, Any]]) -> bytes:
        """Return the body with all choices; between two of them other threads take their turn."""
        start = encode(self.document([])).removesuffix(b"[]}")
        return b'%b%b,"usage":%b}' % (start, encode_parts([choice] for choice in choices), encode(self.usage()))

    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens of all prompts, and of all texts so far."""
        total = self._prompt_tokens + self._generated
        return {"prompt_tokens": self._prompt_tokens, "completion_tokens": self._generated, "total_tokens": total}

    def _common(self, prompt: str | list[int]) -> UncheckedRequest:
        completion, model = self._completion, self._model
        if isinstance(prompt, str):
            text = prompt.encode()
            model.step.check_bytes(model.prompt, len(text))
            contents = np.array([[text]], np.object_)
            inputs = [InputTensor(model.prompt, "BYTES", (1, 1), {}, contents)]
        else:
            shape = (1, len(prompt))
            if prompt:
                model.model.check_shapes({model.ids: shape, model.mask: shape})
            ids = np.array([[whole(token, INT64, "an id of prompt of body") for token in prompt]], np.int64)
            inputs = [
                InputTensor(name, "INT64", shape, {}, values)
                for name, values in ((model.ids, ids), (model.mask, np.ones_like(ids)))
            ]
        names = (model.text, model.generated, *((LOGPROBS, TOKEN_IDS) if completion.logprobs else ()))
        outputs = [RequestedOutput(name, {}) for name in names]
        parameters = parameters_of(completion.parameters, "the request")
        return UncheckedRequest(completion.model, "", "", parameters, inputs, outputs)


class _Spelling:
    """The tokens of one choice as text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pieces, self._length = Pieces(tokenizer), 0

    def spell(self, tensors: Mapping[str, Array]) -> dict[str, Any]:
        """Return the tokens of a response in OpenAI's form, with the place of each in the text."""
        tokens = [self._pieces.add(token) for token in tensors[TOKEN_IDS][0].tolist()]
        offsets = []
        for token in tokens:
            offsets.append(self._length)
            self._length += len(token)
        chosen = tensors[LOGPROBS][0].tolist()
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": None, "text_offset": offsets}
