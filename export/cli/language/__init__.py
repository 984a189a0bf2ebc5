"""The group ``fewheads language``; each of its commands has a file of its name here."""

import click

from export.cli.language.calculator import calculator
from export.cli.language.chunks import chunks
from export.cli.language.compare import compare
from export.cli.language.dequantize import dequantize
from export.cli.language.evaluate import evaluate
from export.cli.language.export import export
from export.cli.language.export_head import export_head
from export.cli.language.finetune import finetune
from export.cli.language.head import head
from export.cli.language.mismatch import mismatch
from export.cli.language.reduce import reduce
from export.cli.language.train import train


@click.group()
def language() -> None:
    """Train, fine-tune, measure, reduce and export language models."""


for _command in (
    train,
    finetune,
    dequantize,
    evaluate,
    reduce,
    export,
    head,
    export_head,
    compare,
    chunks,
    mismatch,
    calculator,
):
    language.add_command(_command)
