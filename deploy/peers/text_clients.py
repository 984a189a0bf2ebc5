"""Load generators that others wrote, on generated text: what they report beside what the server's metrics say.

    .venv/bin/python deploy/peers/text_clients.py BUNDLE --perf-analyzer FILE --out text-clients.json
    .venv/bin/python deploy/peers/text_clients.py BUNDLE --aiperf FILE --tokenizer DIRECTORY

Each program that is given sends requests for texts of exactly ``--tokens``, over each protocol that it has. Prints the
requests, tokens and times to the first token of both sides, and fails if they count differently.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from edge.bundles.bundle import Bundle
from edge.launch import running_server
from edge.server import Ready

#: What one side counts, and the mean time until the first token.
Figures = dict[str, float]


class Trial:
    """A server, and the requests to send."""

    def __init__(self, ready: Ready, model: str, prompts: Sequence[str], requests: int, tokens: int) -> None:
        self.model, self.prompts, self.requests, self.tokens = model, prompts, requests, tokens
        self.grpc, self.http = f"127.0.0.1:{ready.grpc_port}", f"127.0.0.1:{ready.http_port}"
        self._metrics = f"http://127.0.0.1:{ready.metrics_port}/metrics"

    def totals(self) -> Figures:
        """Return the sums of the server so far."""
        with urlopen(self._metrics) as page:
            families = text_string_to_metric_families(page.read().decode())
        values = {one.name: one.value for family in families for one in family.samples}
        return {
            "requests": values.get("nv_inference_request_success", 0),
            "tokens": values.get("fewheads_generated_tokens_total", 0),
            "seconds": values.get("fewheads_first_token_seconds_sum", 0),
        }


def run(*command: object, directory: Path) -> None:
    """Run a program; if it fails, exit with the end of what it printed."""
    path = f"{Path(str(command[0])).parent}:{directory}:{os.environ['PATH']}"
    done = subprocess.run(
        list(map(str, command)), cwd=directory, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{command[0]}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")


def perf_analyzer(program: Path, trial: Trial, directory: Path, kind: str) -> Figures:
    """Return what perf_analyzer exports; ``kind`` is ``grpc``, ``http``, ``stream``, ``openai`` or its stream."""
    length = {"max_tokens": trial.tokens, "min_tokens": trial.tokens}
    openai = kind.startswith("openai")
    if openai:
        body = {"model": trial.model, "temperature": 0, "stream": kind != "openai", **length}
        data = [{"payload": [{**body, "prompt": prompt}]} for prompt in trial.prompts]
        how = ["--service-kind", "openai", "--endpoint", "v1/completions", "--async", "-u", f"http://{trial.http}"]
    else:
        data = [{"prompt": [prompt]} for prompt in trial.prompts]
        how = ["-u", trial.http, "-i", "http"] if kind == "http" else ["-u", trial.grpc, "-i", "grpc"]
        if kind != "http":  # where it sends no parameters
            how += [f"--request-parameter={name}:{value}:int" for name, value in length.items()]
        if kind == "stream":
            how += ["--streaming", "--async", "--request-parameter=stream_partial:true:bool"]
    (directory / "inputs.json").write_text(json.dumps({"data": data}))
    export = directory / "export.json"
    count, files = f"--request-count={trial.requests}", ["--input-data=inputs.json", f"--profile-export-file={export}"]
    run(program, "-m", trial.model, "--concurrency-range=2", count, *files, *how, directory=directory)
    requests = json.loads(export.read_text())["experiments"][0]["requests"]
    answers = [
        [json.loads(one["response"]) if openai else one for one in outputs] for outputs in map(_outputs, requests)
    ]
    if openai:
        tokens = sum(one["usage"]["completion_tokens"] for outputs in answers for one in outputs if one.get("usage"))
    else:
        tokens = sum(outputs[-1]["generated"] for outputs in answers)
    firsts = [(one["response_timestamps"][0] - one["timestamp"]) / 1e6 for one in requests]
    figures = {"requests": len(requests), "responses": sum(map(len, answers)), "first_ms": sum(firsts) / len(firsts)}
    return {**figures, **({"tokens": tokens} if tokens else {})}  # streams of completions have no count of their own


def _outputs(request: dict[str, Any]) -> list[Any]:
    outputs: list[Any] = request["response_outputs"]
    texts = [(one, str(one.get("response", "")).removeprefix("data: ").strip()) for one in outputs]
    return [{**one, "response": text} for one, text in texts if text != "[DONE]"]


def generator(program: Path, trial: Trial, directory: Path, tokenizer: Path, perf: Path | None) -> Figures:
    """Return what GenAI-Perf, with ``perf`` for perf_analyzer, or AIPerf exports for streams of completions."""
    if perf:
        (directory / "perf_analyzer").symlink_to(perf.resolve())
    lengths = ["--synthetic-input-tokens-mean", 20, "--output-tokens-mean", trial.tokens]
    extra = ["--extra-inputs", "temperature:0", "--extra-inputs", f"min_tokens:{trial.tokens}"]
    where = ["--endpoint-type", "completions", "--streaming", "-u", f"http://{trial.http}", "--tokenizer", tokenizer]
    load = ["--concurrency", 2, "--request-count", trial.requests, *lengths, *extra]
    quiet = ["--warmup-request-count", 0] if perf else ["--ui-type", "none"]
    run(program, "profile", "-m", trial.model, *where, *load, *quiet, directory=directory)
    (export,) = directory.glob(f"artifacts/*/profile_export_{'genai_perf' if perf else 'aiperf'}.json")
    found = json.loads(export.read_text())
    requests = found["request_count"]["avg"]
    tokens = round(found["output_sequence_length"]["avg"] * requests)
    return {"requests": requests, "tokens": tokens, "first_ms": found["time_to_first_token"]["avg"]}


def main() -> None:
    """Try each program that is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--perf-analyzer", type=Path)
    parser.add_argument("--genai-perf", type=Path, help="needs --perf-analyzer and --tokenizer")
    parser.add_argument("--aiperf", type=Path, help="needs --tokenizer")
    parser.add_argument("--tokenizer", type=Path, help="the directory of the bundle's tokenizer")
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--out", type=Path, help="the record to write")
    options = parser.parse_args()
    bundle = Bundle.open(options.bundle)
    prompts = [prompt.decode() for prompt in bundle.golden.raw["prompt"][:, 0].tolist()]
    perf, tokenizer = options.perf_analyzer, options.tokenizer
    trials: dict[str, Callable[[Trial, Path], Figures]] = {}
    if perf:
        for kind in ("grpc", "stream", "http", "openai", "openai stream"):
            trials[f"perf_analyzer, {kind}"] = lambda *to, kind=kind: perf_analyzer(perf, *to, kind)
    if options.genai_perf:
        trials["GenAI-Perf"] = lambda *to: generator(options.genai_perf, *to, tokenizer.resolve(), perf)
    if options.aiperf:
        trials["AIPerf"] = lambda *to: generator(options.aiperf, *to, tokenizer.resolve(), None)
    record, failed = [], False
    arguments = ["--target=onnxruntime", "--http-port=0"]
    with (
        tempfile.TemporaryDirectory() as cache,
        running_server([options.bundle], cache=Path(cache), arguments=arguments) as ready,
    ):
        trial = Trial(ready, bundle.manifest.name, prompts, options.requests, options.tokens)
        for name, ask in trials.items():
            before = trial.totals()
            with tempfile.TemporaryDirectory() as directory:
                client = ask(trial, Path(directory))
            server = {key: value - before[key] for key, value in trial.totals().items()}
            server["first_ms"] = 1e3 * server.pop("seconds") / server["requests"]
            agrees = all(server[key] == client[key] for key in ("requests", "tokens") if key in client)
            failed |= not agrees
            record.append({"client": name, "reported": client, "server": server, "agrees": agrees})
            print(f"{name}: {client}; the server: {server}; {'agrees' if agrees else 'DIFFERS'}", flush=True)
    if options.out:
        document = {"tokens": options.tokens, "cpus": os.cpu_count(), "trials": record}
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
