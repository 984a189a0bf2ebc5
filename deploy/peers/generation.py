"""Tokens per second of generated text: served, in a bare loop around ONNX Runtime, and by transformers' ``generate``.

    .venv/bin/python deploy/peers/generation.py MODEL_DIRECTORY BUNDLE --rows 8 --tokens 64 --out generation.json

All three compute the same greedy texts of the same prompts on one thread and take turns. Prints tokens per second, and
the medians of the ratios within a round; ``--out`` writes all of them as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path

import grpc
import numpy as np
import onnxruntime

from edge.bundles.bundle import Bundle
from edge.bundles.programs import GenerateProgram
from edge.datatypes import Array
from edge.launch import serving
from edge.pb import inference_pb2 as pb
from edge.protocol import INFERENCE


def session_of(bundle: Bundle) -> onnxruntime.InferenceSession:
    """Return a session of one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    data = bundle.read(bundle.artifact("onnxruntime", role="backbone").file)
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def bare(
    session: onnxruntime.InferenceSession, program: GenerateProgram, prompts: Array, tokens: int
) -> list[list[int]]:
    """Return the greedy tokens after prompts [N, T], by plain calls of ONNX Runtime on arrays of their final size."""
    rows, length = prompts.shape
    shapes = {one.name: one.shape for one in session.get_inputs()}
    caches = {
        one.past: np.zeros((rows, shapes[one.past][1], length + tokens, shapes[one.past][3]), np.float32)
        for one in program.cache
    }
    names = [program.logits, *(one.new for one in program.cache)]
    fed, texts = prompts, []
    filled = 0
    for _ in range(tokens):
        feeds = {program.tokens: fed, program.lengths: np.full((rows, 1), filled)}
        feeds[program.last] = np.full((rows, 1), fed.shape[1] - 1)
        logits, *new = session.run(names, feeds | caches)
        for cache, entries in zip(caches.values(), new, strict=True):
            cache[:, :, filled : filled + fed.shape[1]] = entries
        filled += fed.shape[1]
        fed = logits.argmax(axis=1)[:, None]
        texts.append(fed[:, 0])
    return np.array(texts).T.tolist()


async def served(channel: grpc.aio.Channel, model: str, prompts: list[str], tokens: int) -> list[str]:
    """Return the texts of concurrent requests, one for each prompt."""
    infer = channel.unary_unary(
        f"/{INFERENCE}/ModelInfer", pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
    )

    async def ask(prompt: str) -> str:
        request = pb.ModelInferRequest(model_name=model)
        given = request.inputs.add(name="prompt", datatype="BYTES", shape=(1, 1))
        given.contents.bytes_contents.append(prompt.encode())
        request.parameters["max_tokens"].int64_param = tokens
        response = await infer(request)
        return str(response.raw_output_contents[0][4:], "utf-8")

    return await asyncio.gather(*map(ask, prompts))


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="the model's directory, for transformers")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="the record to write")
    options = parser.parse_args()
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(options.directory, local_files_only=True).eval()
    tokenizer = Tokenizer.from_file(str(options.directory / "tokenizer.json"))
    bundle = Bundle.open(options.bundle)
    session, program = session_of(bundle), bundle.manifest.program
    assert isinstance(program, GenerateProgram)
    rows, tokens = options.rows, options.tokens
    # One prompt for all rows: the loop and transformers would have to pad others.
    lasting = np.flatnonzero(bundle.golden.outputs[program.generated][:, 0] >= min(tokens, program.max_tokens))
    if not len(lasting):
        parser.error(f"all golden texts of {options.bundle} end before {tokens} tokens; give fewer --tokens")
    text = bundle.golden.raw["prompt"][lasting[0], 0].decode()
    prompts = np.array([tokenizer.encode(text).ids] * rows)
    ids, mask = torch.from_numpy(prompts), torch.ones(prompts.shape, dtype=torch.int64)
    lengths = {"min_new_tokens": tokens, "max_new_tokens": tokens}

    def decoded(rows_of_tokens: list[list[int]]) -> list[str]:
        return [tokenizer.decode(row) for row in rows_of_tokens]

    def library() -> list[str]:
        with torch.no_grad():
            made = model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths)
        return decoded(made[:, ids.shape[1] :].tolist())

    async def measure(port: int) -> dict[str, list[float]]:
        rates: dict[str, list[float]] = {}
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for number in range(options.rounds + 1):
                texts = {}
                for name in ("served", "bare loop", "transformers"):
                    begun = time.perf_counter()
                    if name == "served":
                        texts[name] = await served(channel, bundle.manifest.name, [text] * rows, tokens)
                    else:
                        texts[name] = (
                            library() if name == "transformers" else decoded(bare(session, program, prompts, tokens))
                        )
                    if number:  # the first round warms up
                        rates.setdefault(name, []).append(rows * tokens / (time.perf_counter() - begun))
                assert texts["served"] == texts["bare loop"] == texts["transformers"], texts
        return rates

    with serving(options.bundle, target="onnxruntime") as ready:
        rates = asyncio.run(measure(ready.grpc_port))
    record: dict[str, object] = {
        "rows": rows,
        "tokens": tokens,
        "prompt_tokens": prompts.shape[1],
        "cpus": os.cpu_count(),
    }
    record["tokens_per_second"] = rates
    for name, rate in rates.items():
        ratios = [one / other for one, other in zip(rates["served"], rate, strict=True)]
        record[f"served / {name}"] = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
        print(f"{name}: {statistics.median(rate):.0f} tokens/s, served / {name} {statistics.median(ratios):.2f} "
              f"({min(ratios):.2f} to {max(ratios):.2f})")  # fmt: skip
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
