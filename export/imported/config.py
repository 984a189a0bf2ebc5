"""Files beside the weights of a fine-tuned Hugging Face directory, as far as they shape the head."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from edge.errors import Raw
from export.errors import CheckpointError

PACK = (
    "Export the model to ONNX yourself, and give the file to 'fewheads pack'; "
    "clients then send tensors, such as token ids, and not texts."
)
T = TypeVar("T")


class ModelConfig(msgspec.Struct, frozen=True):
    """``config.json``.

    Attributes:
        architectures: the class of ``transformers`` that saved the model.
        auto_map: classes of Python files in the directory, which are never executed here.
    """

    model_type: str = ""
    architectures: tuple[str, ...] | None = None
    id2label: dict[int, str] | None = None
    problem_type: str | None = None
    auto_map: dict[str, Any] | None = None


class TokenizerConfig(msgspec.Struct, frozen=True):
    """``tokenizer_config.json``; the length is a huge number where none was set."""

    model_max_length: float | None = None


class Side(msgspec.Struct, frozen=True, omit_defaults=True):
    """A size of images: of both sides, or of the shorter one."""

    height: int | None = None
    width: int | None = None
    shortest_edge: int | None = None


class ImageConfig(msgspec.Struct, frozen=True):
    """``preprocessor_config.json`` of an image processor; ``resample`` is the number of Pillow's filter.

    ``crop_pct`` is the side of the square that is kept, as a share of the shorter side.
    """

    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    size: Side | int
    resample: int = 2
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    do_center_crop: bool | None = None
    crop_size: Side | int | None = None
    crop_pct: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    rescale_factor: float = 1 / 255


def read_json(path: Path, kind: type[T]) -> T:
    """Read a JSON file.

    Raises:
        CheckpointError: it is missing, or a field has another type.
    """
    fix = "Save it again with save_pretrained of transformers or sentence-transformers."
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise CheckpointError(f"{path}", given=Raw(error.strerror), expected="a file", fix=fix) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        expected = "the JSON of a Hugging Face model"
        raise CheckpointError(f"{path}", given=Raw(error), expected=expected, fix=fix) from None
