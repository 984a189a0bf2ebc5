"""``fewheads infer`` on a model that generates text."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from typing import Any

from click.testing import CliRunner

from edge.__main__ import cli
from edge.server import Ready
from tests.support.commands import mistake, shown
from tests.support.letters_model import FAILING, NAME, PROMPT, TEXT, continued
from tests.support.models import ORACLE

#: A prompt after which the text ends.
ENDED = "aya"


def infer(server: Ready, *arguments: object) -> list[object]:
    return ["infer", "--url", f"127.0.0.1:{server.grpc_port}", NAME, PROMPT, *arguments]


def test_options_reach_the_model(writer: Ready) -> None:
    def answer(*options: object) -> Any:
        return json.loads(shown(*infer(writer, *options, "--json")))

    found = answer("--max-tokens", 6)
    assert (found["outputs"], found["stopped"]) == ({"text": [[TEXT]], "generated": [[6]]}, "length")
    found = answer("--stop", "none", "--stop", TEXT[1:3])
    assert (found["outputs"]["text"], found["stopped"]) == ([[TEXT[0]]], "stop")
    greedy, drawn = continued(PROMPT), [*infer(writer), "--temperature", 1, "--seed", 5, "--json"]
    assert json.loads(shown(*drawn))["outputs"]["text"] == json.loads(shown(*drawn))["outputs"]["text"] != [[greedy]]
    for option in ("--top-k=1", "--top-p=1e-6"):
        assert answer("--temperature=1", option)["outputs"]["text"] == [[greedy]]

    def text_and_tokens(*options: object) -> Any:
        outputs = answer(ENDED, "--max-tokens", 3, *options)["outputs"]
        return outputs["text"][1], outputs["generated"][1]

    assert text_and_tokens() == ([""], [1])
    assert text_and_tokens("--ignore-eos") == ([""], [3])  # ends of a text have no letters
    assert text_and_tokens("--min-tokens", 2) == (["aab"], [3])
    lines = shown(*infer(writer, "--max-tokens", 6)).splitlines()
    assert any(all(cell in line for cell in ("prompt", "text", "generated")) for line in lines)


def test_text_is_printed_as_it_comes(writer: Ready, slow_writer: Ready) -> None:
    command = [*map(str, infer(writer, "de", "--stream", "--max-tokens=6"))]
    done = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert done.stdout == f"{TEXT}\n{continued('de', 6)}\n"
    assert [line.partition(";")[0] for line in done.stderr.splitlines()] == ["6 tokens, stopped by its length"] * 2
    # On a terminal nothing has to ask for it.
    terminal, side = pty.openpty()
    command = [sys.executable, "-m", "edge", *map(str, infer(slow_writer, "--max-tokens=6"))]
    with subprocess.Popen(command, stdout=side, stderr=subprocess.DEVNULL):
        os.close(side)
        pieces = []
        with suppress(OSError):  # Linux ends a terminal with an error
            while piece := os.read(terminal, 1024):
                pieces.append(piece)
    os.close(terminal)
    assert len(pieces) > 3
    assert b"".join(pieces).decode().strip() == TEXT


def test_streams_end_with_errors(writer: Ready) -> None:
    assert "parameter 'max_tokens' of 'letters': got 500" in mistake(
        *infer(writer, "--stream", "--max-tokens=500"), code=7
    )
    assert "logits that are not finite" in mistake(*infer(writer, FAILING, "--stream"), code=7)
    assert mistake(*infer(writer, "--stream", "--json")).startswith("--stream: got --json, too, expected one of them")
    message = mistake("infer", "--url", f"127.0.0.1:{writer.grpc_port}", ORACLE, "1 + 1", "--stream")
    assert message.startswith(f"--stream for {ORACLE}: got the outputs value, expected a model with text and generated")
