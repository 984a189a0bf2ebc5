"""Data for the tests of tasks: real data if they are there, and a task that is small enough to learn."""

import gzip
import os
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from export.data.examples import Examples
from export.data.tokens import encode
from export.finetune.objectives import TaskObjective
from export.finetune.predictions import predict
from export.models.heads import SequenceClassifier
from export.models.huggingface import FORMATS
from export.models.transformer import LayerShape, Transformer, TransformerConfig
from export.training.objective import Observer
from export.training.trainer import train

POSITIVE, NEGATIVE = ["good", "fine", "nice"], ["bad", "awful", "poor"]
NEUTRAL = ["film", "plot", "actor", "scene", "the", "a", "is", "was", "and", "not", "cat", "sat", "on", "mat"]


def real(*parts):
    """Return a path below the real data; the test is skipped where it is absent."""
    root = Path(os.environ.get("FEWHEADS_DATA", Path(__file__).parents[3] / "shared" / "data"))
    path = root.joinpath(*parts)
    if not path.exists():
        pytest.skip(
            f"no {'/'.join(parts)}: set FEWHEADS_DATA to a directory as export/finetune/__init__.py describes it"
        )
    return path


def finished(command, *arguments):
    """Run a command in this process and return its result; it must succeed."""
    result = CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return result


def invoke(command, *arguments):
    """Return what a command prints that succeeds."""
    return finished(command, *arguments).stdout


def make_tokenizer(special=("[PAD]", "[UNK]", "[CLS]", "[SEP]")):
    """Return a tokenizer of whole words that frames texts as BERT does; ``special`` are the first words."""
    vocabulary = {word: number for number, word in enumerate([*special, *POSITIVE, *NEGATIVE, *NEUTRAL, "."])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def make_transformer(layers=2, dim=32, seed=0):
    """Return a BERT with random weights for :func:`make_tokenizer`."""
    torch.manual_seed(seed)
    shape = LayerShape(num_heads=2, head_dim=dim // 2, ffn_dim=2 * dim)
    sizes = {"dim": dim, "vocab_size": 32, "max_positions": 64, "segments": 2}
    transformer = Transformer(TransformerConfig(architecture="bert", layers=(shape,) * layers, **sizes))
    # Words count for more than places, so that a toy task is learnt in few steps.
    torch.nn.init.normal_(transformer.embeddings.position.weight, std=0.1)
    return transformer


def make_classifier(labels=2, seed=0, **options):
    return SequenceClassifier(make_transformer(seed=seed), labels, **options)


def make_sentiment(number, seed=0):
    """Return sentences and whether one of their words is positive, [(text, label)]."""
    generator = torch.Generator().manual_seed(seed)

    def pick(words):
        return words[int(torch.randint(len(words), (1,), generator=generator))]

    items = []
    for index in range(number):
        words = [pick(NEUTRAL) for _ in range(3 + index % 5)]
        label = int(torch.randint(2, (1,), generator=generator))
        words.insert(index % len(words), pick(POSITIVE if label else NEGATIVE))
        items.append((" ".join(words), label))
    return items


def encoded(items):
    examples = Examples(tuple((text,) for text, _ in items), np.array([label for _, label in items]))
    return encode(make_tokenizer(), examples, 64)


def accuracy_on(model, rows):
    def evaluate():
        predicted = predict(model, rows)
        return float((predicted.answers == predicted.targets).mean())

    return evaluate


def fine_tune(model, rows, recipe, *, evaluate, teacher=None, objective=TaskObjective, **options):
    """Train a model in place; ``options`` are those of the trainer."""
    return train(objective(model, rows, recipe, seed=0, evaluate=evaluate, teacher=teacher), recipe, seed=0, **options)


class Seen(Observer):
    """Keeps what a training reports, and interrupts it in its step ``stop``, counted over all of its stages."""

    def __init__(self, stop=None):
        self.resumed, self.steps, self.epochs = [], [], []
        self.stop = stop

    def on_resume(self, step, steps):
        self.resumed.append((step, steps))

    def on_step(self, step):
        self.steps.append(step)
        if len(self.steps) == self.stop:
            raise KeyboardInterrupt

    def on_epoch(self, epoch):
        self.epochs.append(epoch)


def same(one, other):
    ours, theirs = (x.state_dict() if isinstance(x, torch.nn.Module) else x for x in (one, other))
    return ours.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def write_rows(path, columns, rows, delimiter=","):
    """Write rows, without quotes, in the format that the path's end names, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [dict(zip(columns, row, strict=True)) for row in rows]
    if path.suffix == ".jsonl":
        path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    elif path.suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    else:
        between = "\t" if path.suffix == ".tsv" else delimiter
        path.write_bytes("".join(f"{between.join(map(str, row))}\n" for row in (columns, *rows)).encode())
    return path


def write_sst2(root, train=360):
    folder = root / "glue" / "SST-2"
    folder.mkdir(parents=True)
    for name, number, seed in (("train", train, 0), ("dev", 40, 1)):
        lines = ["sentence\tlabel", *(f"{text} \t{label}" for text, label in make_sentiment(number, seed))]
        (folder / f"{name}.tsv").write_text("\n".join(lines))


def write_model(directory, transformer):
    """Write a transformer as a Hugging Face directory of BERT."""
    from safetensors.torch import save_file

    config = transformer.config
    shape = config.layers[0]
    directory.mkdir(parents=True)
    fields = {"model_type": "bert", "hidden_act": "gelu", "layer_norm_eps": config.norm_eps}
    fields |= {"hidden_size": config.dim, "num_hidden_layers": len(config.layers), "vocab_size": config.vocab_size}
    fields |= {"num_attention_heads": shape.num_heads, "intermediate_size": shape.ffn_dim}
    fields |= {"max_position_embeddings": config.max_positions, "type_vocab_size": config.segments}
    (directory / "config.json").write_bytes(msgspec.json.encode(fields))
    weights = transformer.state_dict()
    names = FORMATS["bert"].names(weights)
    save_file({names[name]: tensor.contiguous() for name, tensor in weights.items()}, directory / "model.safetensors")
    make_tokenizer().save(str(directory / "tokenizer.json"))


def write_idx(path, values, header=None):
    """Write bytes as an IDX file, behind another header if there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = header or struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    path.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes()))
