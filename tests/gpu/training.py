"""One short fine-tuning, reduction, distillation and restoration by ``fewheads``, on the CPU and on the GPU, in FP32.

The data are generated sentences, and the model has random weights, so nothing is downloaded. ``python -m
tests.gpu.training`` prints the comparison as JSON.
"""

import csv
import json
import sys
import tempfile
from pathlib import Path

import msgspec
import torch

from export.cli.finetune import finetune
from export.cli.reduce import reduce
from export.reduce.target import LATENCIES
from export.training.device import device_of
from export.training.runs import METRICS, RunMetrics
from tests.support.task_data import invoke, make_sentiment, make_transformer, write_model

#: The largest difference of two mean losses of an epoch. A GPU adds in another order, and training amplifies that.
MOST_DIFFERENCE = 0.02
#: The runs: fine-tuned, distilled on labelled rows, and restored on plain text, where a GPU multiplies in bf16.
COMPARED = ("tuned", "taught", "restored")
OPTIONS = ("--epochs", 2, "--lr", 1e-3, "--batch", 32, "--max-length", 32, "--precision", "fp32", "--no-report")


def read(run):
    return msgspec.json.decode((run / METRICS).read_bytes(), type=RunMetrics)


def compare(devices=("cpu", "cuda"), texts=3000, dim=256):
    """Return losses, scores and seconds of each device, the largest difference of losses, and the ratio of seconds.

    ``fewheads reduce`` cuts on the CPU; what it has removed is distilled and restored on each device.
    """
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        write_model(root / "model", make_transformer(layers=4, dim=dim))
        with open(root / "reviews.csv", "w", newline="") as file:
            csv.writer(file).writerows([("review", "stars"), *make_sentiment(texts)])
        data = ("--data", root / "reviews.csv", "--label", "stars", *OPTIONS)
        found = {}
        for device in devices:
            warm = torch.ones(64, 64, device=device_of(device))
            warm @ warm  # loads the libraries before anything is timed
            options = ("--device", device, "--out", root / device, "--name")
            invoke(finetune, *data, *options, "tuned", "--model", root / "model")
        teacher = root / devices[0] / "tuned"
        calibration = ("--calibration", 200, "--tokens", 16, "--target-speedup", 1.5)
        reduced = json.loads(invoke(reduce, teacher, *calibration, "--out", root / "small", "--json"))
        for device in devices:
            options = ("--device", device, "--out", root / device, "--name")
            invoke(finetune, *data, *options, "taught", "--model", root / "small", "--teacher", teacher)
        (root / "texts.txt").write_text("\n".join(dict.fromkeys(text for text, _ in make_sentiment(texts))))
        # One table for both, because a plan by other timings is another model.
        plain = ("--distil", root / "texts.txt", "--latency-table", root / f".{teacher.name}.reduction" / LATENCIES)
        plain += ("--leave-out-evaluated",)
        for device in devices:
            invoke(reduce, teacher, *calibration, *plain, "--device", device, "--out", root / device / "restored")
        for name in COMPARED:
            runs = {device: read(root / device / name) for device in devices}
            ours, theirs = (runs[device].losses for device in devices)
            found[name] = {
                "losses": {device: run.losses for device, run in runs.items()},
                "holdout": {device: run.scores for device, run in runs.items()},
                "seconds": {device: run.seconds for device, run in runs.items()},
                "loss_difference": max(abs(a - b) for a, b in zip(ours, theirs, strict=True)),
                "times_faster": runs[devices[0]].seconds / runs[devices[1]].seconds,
            }
        found["reduced_on_cpu"] = {"times_faster": reduced["measured_speedup"]}
    differing = [name for name in COMPARED if not found[name]["loss_difference"] < MOST_DIFFERENCE]
    return found | {"differing": differing}


if __name__ == "__main__":
    compared = compare()
    print(json.dumps(compared))
    if compared["differing"]:
        sys.exit(f"losses on the two devices differ by {MOST_DIFFERENCE} or more: {', '.join(compared['differing'])}")
