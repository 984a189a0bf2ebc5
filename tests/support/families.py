"""Records of families of ``fewheads frontier``, without trainings."""

import msgspec
import numpy as np

from edge.bench.layer_latencies import PREDICTION
from edge.files import write_whole
from export.models.transformer import LayerShape
from export.papers.experiment import RECORDS, SETTINGS
from export.papers.frontier.records import DENSE, Answered, ExperimentSettings, Record, Tier, Timed, encoded, frozen
from export.training.points import Planned, PointTimes
from export.training.provenance import Processor

ITEMS = 200
FRONTIER = frozen({})
TIERS = {
    f"{faster}x": Tier(
        "", Planned(faster, "orin", PREDICTION, (PointTimes(32, 1, dense_ms=faster, milliseconds=1),), (0,), 6)
    )
    for faster in (2, 3, 4)
}
FEW = ExperimentSettings(frontier=FRONTIER, model="", tiers=TIERS, control="3x", transfer="", data={}, versions={})
D32, D8, HALF, THIRD, CONTROL = (
    (DENSE, "fp32"),
    (DENSE, "int8"),
    ("2x", "fp32"),
    ("3x", "fp32"),
    ("3x-not-restored", "fp32"),
)


def family(task, seed, wrong):
    """Return the records of a family whose files answer so many items of 200 wrongly, half of which are of class 1."""
    targets = (np.arange(ITEMS) % 2).astype(float)
    answers = {key: np.where(np.arange(ITEMS) < number, 1 - targets, targets) for key, number in wrong.items()}
    names = ["/".join(key) for key in wrong]
    speedups = dict(zip(names, (1.0, 2.0, 2.0 * 4**seed, 3.0, 4.0, 5.0, 6.0), strict=False))
    here = Processor("Z80", ())
    answered = Answered(
        task=task, seed=seed, dense=DENSE, holdout={DENSE: 0.9}, holdout_items=10, items=ITEMS, mean_tokens=12.0,
        dim=384, layers={run: (LayerShape(12, 32, 1536),) * 6 for run, _ in wrong},
        file_bytes=dict.fromkeys(names, 1000), processor=here, answers=encoded(answers, targets),
    )  # fmt: skip
    return answered, Timed(speedups, speedups, speedups, ITEMS, here)


def write_families(out, families):
    """Write records, and settings with as many seeds."""
    seeds = {}
    for answered, _ in families:
        seeds[answered.task] = seeds.get(answered.task, 0) + 1
    tasks = {task: msgspec.structs.replace(FRONTIER.tasks[task], seeds=number) for task, number in seeds.items()}
    settings = msgspec.structs.replace(FEW, frontier=msgspec.structs.replace(FRONTIER, tasks=tasks))
    write_whole(out / SETTINGS, msgspec.json.encode(settings))
    lines = []
    for answered, timed in families:
        name = f"{answered.task}-seed{answered.seed}"
        lines.append({"part": name, "seconds": 1, "record": Record(answered=answered)})
        lines.append({"part": f"{name}-times", "seconds": 1, "record": Record(timed=timed)})
    write_whole(out / RECORDS, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
