"""What models do with the texts of clients that know no tensors: they continue, embed or rank them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from edge.bundles.preprocess import TokenizerPreprocessor
from edge.bundles.programs import GenerateProgram
from edge.bundles.steps import ScorePostprocess
from edge.errors import NotFound, Raw
from edge.programs.generate import Generate
from edge.repository.model import Model
from edge.repository.repository import Repository

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Names of an output that is an embedding, also where its tiers state no space: ours, and sentence-transformers'.
_EMBEDDINGS: Final = ("embedding", "sentence_embedding")


class TextGenerator(NamedTuple):
    """A model that continues texts, and the names of its inputs and outputs."""

    model: Model
    step: TokenizerPreprocessor
    prompt: str
    ids: str  # those of the prompt's tokens, and their mask
    mask: str
    text: str
    generated: str  # the number of its tokens
    tokenizer: Tokenizer


class Embedder(NamedTuple):
    """A model that turns each text into a vector of so many numbers: its output of this name."""

    model: Model
    step: TokenizerPreprocessor
    output: str
    dimensions: int


class Reranker(NamedTuple):
    """A model that scores a pair of texts, such as a query and a document: its output of this name."""

    model: Model
    step: TokenizerPreprocessor
    output: str


TextModel = TextGenerator | Embedder | Reranker
#: What each kind does, as ``/v1/models`` says it.
DOES: Final[dict[type[TextModel], str]] = {TextGenerator: "completions", Embedder: "embeddings", Reranker: "rerank"}
T = TypeVar("T", TextGenerator, Embedder, Reranker)


class TextModels:
    """The models of a repository that are ready and read texts, each in its highest version."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    def __iter__(self) -> Iterator[TextModel]:
        models = {entry.name: entry.model for entry in self._repository if entry.model}
        return (found for model in models.values() if (found := text_model(model)))

    def find(self, name: str, kind: type[T]) -> T:
        """Return the model of this name; raise a NotFound if it is not ready, or does something else."""
        _, model = self._repository.ready(name, "")
        found = text_model(model)
        if isinstance(found, kind):
            return found
        given, fix = Raw(f"a model without {DOES[kind]}"), "GET /v1/models says what each model does."
        raise NotFound(f"model {name!r}", given=given, expected=self._known(kind), fix=fix)

    def only(self, kind: type[T]) -> T:
        """Return the one model of a kind; raise a NotFound if there are none or several."""
        found = [one for one in self if isinstance(one, kind)]
        if len(found) == 1:
            return found[0]
        given, fix = Raw("no name"), "Name one of them; GET /v1/models says what each model does."
        raise NotFound("model", given=given, expected=self._known(kind), fix=fix)

    def get(self, name: str) -> TextModel:
        """Return the model of this name; raise a NotFound if it is not ready, or reads no texts of such clients."""
        _, model = self._repository.ready(name, "")
        if found := text_model(model):
            return found
        given, expected = Raw("a model that does nothing with texts"), _list([one.model.name for one in self])
        raise NotFound(f"model {name!r}", given=given, expected=expected, fix="GET /v1/models lists them.")

    def _known(self, kind: type[TextModel]) -> str:
        return _list([one.model.name for one in self if isinstance(one, kind)])


def text_model(model: Model) -> TextModel | None:
    """Return what a model does with texts; None if it reads none, or its answers are no text, vector or score."""
    manifest, step = model.manifest, model.step
    program, after = manifest.program, manifest.postprocess
    if not isinstance(step, TokenizerPreprocessor):
        return None
    config = step.config
    if isinstance(program, GenerateProgram):
        assert isinstance(model.program, Generate)
        names = (config.input, config.ids, config.mask, program.text, program.generated)
        return TextGenerator(model, step, *names, model.program.tokenizer)
    if isinstance(after, ScorePostprocess) and config.pair:
        return Reranker(model, step, after.output)
    first = manifest.outputs[0]
    is_embedding = first.name in _EMBEDDINGS or manifest.space
    if len(manifest.outputs) > 1 or not is_embedding or after or config.pair or not manifest.max_batch_size:
        return None
    is_vector = first.datatype == "FP32" and len(first.shape) == 2 and first.shape[1] > 0
    return Embedder(model, step, first.name, first.shape[1]) if is_vector else None


def _list(names: list[str]) -> str:
    return f"one of: {', '.join(names) or 'none at all'}"
