"""Directories for ``fewheads import``: a small BERT with a classifier, and one of sentence-transformers."""

import json
import warnings

import safetensors.torch
import torch

from tests.support.task_data import make_transformer, write_model

LABELS = {"0": "bad", "1": "good"}


def change(path, **fields):
    """Set fields of a JSON file; None removes one."""
    found = {**(json.loads(path.read_text()) if path.exists() else {}), **fields}
    path.write_text(json.dumps({name: value for name, value in found.items() if value is not None}))


def write_classifier(directory, per_token=False, seed=0):
    """Write and return a directory of a BERT that tells two labels apart, for texts or for each of their tokens."""
    write_model(directory, make_transformer(layers=1, seed=seed))
    kind = "Token" if per_token else "Sequence"
    change(directory / "config.json", architectures=[f"BertFor{kind}Classification"], id2label=LABELS)
    weights = safetensors.torch.load_file(directory / "model.safetensors")
    for name, rows in (("pooler.dense", 32), ("classifier", 2)):
        weights |= {f"{name}.weight": torch.randn(rows, 32), f"{name}.bias": torch.randn(rows)}
    safetensors.torch.save_file(weights, directory / "model.safetensors")
    return directory


def random_model(kind, fields):
    """Return a model of a class of transformers, whose biases and normalisations are random, too."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    model_class = getattr(transformers, kind)
    model = model_class(model_class.config_class(**fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.1)
    return model


def write_traced(model, inputs, axes, path, opset):
    """Write the file that torch's older exporter, as that of most files which users have, makes of such a model.

    ``axes`` has the dynamic axes of all tensors by their names; those that are no inputs are the outputs.
    """
    outputs = [name for name in axes if name not in inputs]

    class Outputs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, *tensors):
            found = self.model(**dict(zip(inputs, tensors, strict=True)))
            return tuple(found[name] for name in outputs)

    options = {"input_names": [*inputs], "output_names": outputs, "dynamic_axes": axes, "opset_version": opset}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        torch.onnx.export(Outputs().eval(), tuple(inputs.values()), path, **options, dynamo=False)


def with_tokenizer(directory):
    """Add what transformers needs to read the tokenizer."""
    change(directory / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", pad_token="[PAD]")


def write_embedder(directory, seed=0, layers=1):
    """Write and return a directory of sentence-transformers, version 2: mean, a dense layer with tanh, no length."""
    write_model(directory, make_transformer(layers=layers, seed=seed))
    change(directory / "config.json", architectures=["BertModel"])
    write_modules(directory, "Transformer", "Pooling", "Dense")
    (directory / "1_Pooling").mkdir()
    pooling = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False, "word_embedding_dimension": 32}
    change(directory / "1_Pooling" / "config.json", **pooling)
    (directory / "2_Dense").mkdir()
    tanh = "torch.nn.modules.activation.Tanh"
    change(directory / "2_Dense" / "config.json", in_features=32, out_features=8, bias=True, activation_function=tanh)
    dense = {"linear.weight": torch.randn(8, 32), "linear.bias": torch.randn(8)}
    safetensors.torch.save_file(dense, directory / "2_Dense" / "model.safetensors")
    return directory


def write_modules(directory, *kinds):
    modules = [
        {
            "idx": at,
            "name": f"{at}",
            "path": f"{at}_{kind}" if at else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for at, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
