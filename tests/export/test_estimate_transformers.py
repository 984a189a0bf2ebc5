import pytest
import torch

from export.bundle.fewest_kernels import fewest_kernels
from export.estimate.devices import DEFAULT_BOARD
from export.estimate.operations import work_of
from export.estimate.roofline import predict
from export.estimate.work import transformer_work
from export.models.convert import dynamic_of, to_onnx
from export.models.heads import SequenceClassifier
from export.models.transformer import LayerShape, Transformer, TransformerConfig
from export.quantize.precision import half
from export.reduce.latency import feeds_of

#: Layers with both halves, one of them, and none; with a single head, which gets another one.
LAYERS = tuple(LayerShape(*sizes) for sizes in ((4, 32, 512), (0, 0, 256), (3, 16, 0), (1, 32, 128), (0, 0, 0)))
IMAGES = {"image_size": 32, "patch_size": 8, "channels": 3, "max_positions": 17}


@pytest.mark.parametrize(("architecture", "sizes"), [("bert", {"vocab_size": 100}), ("vit", IMAGES)])
def test_the_work_by_the_sizes_of_layers_is_that_of_the_file(architecture, sizes):
    config = TransformerConfig(architecture=architecture, layers=LAYERS, dim=128, **sizes)
    feeds = {
        name: torch.from_numpy(array).repeat(2, *[1] * (array.ndim - 1)) for name, array in feeds_of(config, 32).items()
    }
    model = SequenceClassifier(Transformer(config), 3)
    plain = to_onnx(model, feeds, ["logits"], dynamic_of({name: array.numpy() for name, array in feeds.items()}))
    file = half(fewest_kernels(plain))  # as an export writes it
    for rows, tokens in ((1, 32), (8, 128)):
        tokens = tokens if architecture == "bert" else config.max_positions
        shapes = {
            name: (rows, tokens) if array.ndim == 2 else (rows, *array.shape[1:]) for name, array in feeds.items()
        }
        of_file, of_sizes = work_of(file, shapes, "model"), transformer_work(config, tokens, rows, 3)
        assert (len(of_sizes.kernels), of_sizes.others, of_sizes.batch) == (len(of_file.kernels), of_file.others, rows)
        assert of_sizes.gflop == {"fp16": pytest.approx(of_file.gflop["fp16"], rel=1e-6)}
        assert of_sizes.weight_bytes == pytest.approx(of_file.weight_bytes, rel=0.01)
        of_file, of_sizes = (predict(work, None, DEFAULT_BOARD.mode) for work in (of_file, of_sizes))
        assert of_sizes.milliseconds == pytest.approx(of_file.milliseconds, rel=1e-3)
        assert of_sizes.regimes == of_file.regimes
