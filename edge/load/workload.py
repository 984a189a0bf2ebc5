"""Request mix of a load run: models, tiers, priorities and deadlines in given shares, as ready messages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge.bundles.bundle import Bundle
from edge.client.inference import infer_request, text
from edge.datatypes import Array
from edge.errors import Literally, UsageError
from edge.load.bench import direct_inputs
from edge.pb import inference_pb2 as pb
from edge.programs.cascade import AUTO
from edge.scheduling.job import PRIORITY_LEVELS
from edge.scheduling.tier_selection import POLICIES

#: Of one bundle: enough to meet all lengths, and bounded whatever the bundle or the file of texts holds.
_MAX_MESSAGES = 1024
#: Draws at once.
_BLOCK = 4096


class Kind(NamedTuple):
    """Requests that differ in nothing but their inputs.

    Attributes:
        model: its name.
        choice: the requested policy or tier; empty for the server's choice.
        priority: 1 to 10; 0 for the server's default.
        deadline_ms: from when a request is due; 0 for none.
        tiered: whether the model has several tiers, so that an answer says which gave it.
    """

    model: str
    choice: str
    priority: int
    deadline_ms: float
    tiered: bool


class Shares(NamedTuple):
    """Values of one aspect of a request, and how many parts of all requests have each."""

    values: tuple[str, ...]
    parts: tuple[float, ...]

    @classmethod
    def parse(cls, option: str, text: str) -> Shares:
        """Read ``VALUE`` or ``VALUE=PARTS,VALUE=PARTS``.

        Raises:
            UsageError: there is a value without a name, or parts that are no number above 0.
        """
        fix = "Write VALUE, or VALUE=PARTS,VALUE=PARTS, such as 1=1,5=9."
        values, parts = [], []
        for item in text.split(","):
            value, _, part = item.strip().partition("=")
            try:
                number = float(part or 1)
            except ValueError:
                number = math.nan
            if not value or not 0 < number < math.inf:
                raise UsageError(option, given=item, expected="a value and its parts, a number above 0", fix=fix)
            values.append(value)
            parts.append(number)
        return cls(tuple(values), tuple(parts))

    def numbers(self, option: str, least: float, most: float) -> list[float]:
        """Return the values as numbers.

        Raises:
            UsageError: one is none, or out of range.
        """
        found = []
        for value in self.values:
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            if not least <= number <= most:
                expected = f"{least:g} to {most:g}" if most < math.inf else f"{least:g} or more"
                raise UsageError(option, given=value, expected=expected, fix="Change it.")
            found.append(number)
        return found


#: Of an aspect that is left to the server.
UNSAID = Shares(("",), (1.0,))


class Workload:
    """An endless sequence of requests, the same for the same seed.

    Args:
        bundles: the models to send requests to, and the share of each.
        rows: of each request.
        choices: policies or tiers, and their parts.
        priorities: likewise.
        deadlines_ms: likewise.
        texts: lines to ask in place of the golden inputs, the two texts of a pair with a tab between.
        seed: of the sequence.

    Attributes:
        kinds: all combinations, in the order in which :meth:`draw` counts them.

    Raises:
        UsageError: a share or a text does not fit.
    """

    def __init__(
        self,
        bundles: Mapping[Bundle, float],
        *,
        rows: int = 1,
        choices: Shares = UNSAID,
        priorities: Shares = UNSAID,
        deadlines_ms: Shares = UNSAID,
        texts: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        levels = [0.0] if priorities is UNSAID else priorities.numbers("--priority", 1, PRIORITY_LEVELS)
        deadlines = [0.0] if deadlines_ms is UNSAID else deadlines_ms.numbers("--deadline-ms", 1, math.inf)
        self.kinds: list[Kind] = []
        self._bodies: list[list[bytes]] = []
        self._tails: list[bytes] = []
        parts = []
        for bundle, part in bundles.items():
            bodies = _bodies(bundle, rows, texts)
            tiers = [tier.name for tier in bundle.manifest.tiers]
            aspects = product(
                zip(choices.values, choices.parts, strict=True),
                zip(levels, priorities.parts, strict=True),
                zip(deadlines, deadlines_ms.parts, strict=True),
            )
            for (choice, one), (level, two), (deadline, three) in aspects:
                _check_choice(choice, bundle, tiers)
                self.kinds.append(Kind(bundle.manifest.name, choice, int(level), deadline, len(tiers) > 1))
                self._bodies.append(bodies)
                self._tails.append(_tail(choice, int(level)))
                parts.append(part * one * two * three)
        self._parts = np.array(parts) / sum(parts)
        self._generator = np.random.default_rng([seed, 1])  # not the sequence of the arrivals
        self._drawn: list[tuple[int, int]] = []

    def draw(self) -> tuple[int, bytes]:
        """Return the next request: its place in :attr:`kinds`, and its message."""
        if not self._drawn:
            kinds = self._generator.choice(len(self.kinds), _BLOCK, p=self._parts).tolist()
            places = self._generator.random(_BLOCK).tolist()
            self._drawn = [
                (kind, int(place * len(self._bodies[kind]))) for kind, place in zip(kinds, places, strict=True)
            ]
        kind, place = self._drawn.pop()
        # Protobuf messages are joined by writing one behind the other.
        return kind, self._bodies[kind][place] + self._tails[kind]


def timeout_tail(seconds: float) -> bytes:
    """Return what gives a message the parameter ``timeout`` if it is appended."""
    tail = pb.ModelInferRequest()
    tail.parameters["timeout"].int64_param = max(int(seconds * 1e6), 1)
    return tail.SerializeToString()


def _tail(choice: str, priority: int) -> bytes:
    tail = pb.ModelInferRequest()
    if choice:
        tail.parameters["policy" if choice in POLICIES else "tier"].string_param = choice
    if priority:
        tail.parameters["priority"].int64_param = priority
    return tail.SerializeToString()


def _check_choice(choice: str, bundle: Bundle, tiers: list[str]) -> None:
    known = [*POLICIES, *tiers, AUTO]
    if choice and choice not in known:
        subject = f"--policy for {bundle.manifest.name}"
        raise UsageError(
            subject, given=choice, expected=f"one of {', '.join(known)}", fix="Leave it out for the server's."
        )


def _bodies(bundle: Bundle, rows: int, texts: Sequence[str]) -> list[bytes]:
    name, version = bundle.manifest.name, str(bundle.manifest.version)
    inputs = _golden_or_texts(bundle, rows, texts)[:_MAX_MESSAGES]
    return [infer_request(name, each, version=version).SerializeToString() for each in inputs]


def _golden_or_texts(bundle: Bundle, rows: int, texts: Sequence[str]) -> list[dict[str, Array]]:
    if not texts:
        return direct_inputs(bundle, rows)
    step = bundle.manifest.preprocess
    return text_inputs(bundle.manifest.name, [spec.name for spec in step.inputs] if step else [], rows, texts)


def text_inputs(model: str, names: Sequence[str], rows: int, texts: Sequence[str]) -> list[dict[str, Array]]:
    """Return requests of ``rows`` successive lines each, starting over after the last line.

    Args:
        model: its name, for errors.
        names: of its text inputs.
        rows: of each request.
        texts: lines, with a tab between the texts of a pair.

    Raises:
        UsageError: a line has more or fewer texts than the model has text inputs.
    """
    columns = [line.split("\t") for line in texts]
    wrong = next((line for line in columns if len(line) != len(names)), None)
    if wrong is not None:
        given = Literally(f"a line of {len(wrong)}, {chr(9).join(wrong)[:40]!r}")
        expected = f"{len(names)}, separated by tabs" if names else f"none, since {model} takes no text"
        raise UsageError("--texts", given=given, expected=expected, fix="Leave it out for the golden inputs.")
    picks = [[columns[(start + row) % len(columns)] for row in range(rows)] for start in range(len(columns))]
    return [
        {name: text([line[index] for line in pick]) for index, name in enumerate(names)}
        for pick in picks[:_MAX_MESSAGES]
    ]


def read_texts(path: Path) -> list[str]:
    """Read the lines of a file that are not empty, in UTF-8.

    Raises:
        UsageError: it cannot be read, or has none.
    """
    fix = "Write one text for each request into a line."
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}", given=Literally(error), expected="a file of texts", fix=fix) from None
    if not lines:
        raise UsageError(f"{path}", given=Literally("no lines"), expected="one at least", fix=fix)
    return lines
