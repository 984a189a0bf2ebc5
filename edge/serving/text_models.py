"""What models do with the texts of clients that know no tensors: they continue, embed or rank them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from edge.bundles.manifest import Manifest
from edge.bundles.preprocess import TokenizerPreprocessor
from edge.bundles.programs import GenerateProgram
from edge.bundles.steps import ScorePostprocess, TokenizerPreprocess
from edge.errors import NotFound, Raw
from edge.programs.generate import Generate
from edge.repository.entry import Entry
from edge.repository.model import Model
from edge.repository.repository import NotLoaded, Repository
from edge.serving.waiting import LoadWaits

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
    """The models of a repository that read texts and answer requests, each in its highest version."""

    def __init__(self, repository: Repository, models: LoadWaits) -> None:
        self._repository, self._models = repository, models

    def __iter__(self) -> Iterator[tuple[Entry, type[TextModel]]]:
        entries = {entry.name: entry for entry in self._repository if entry.answers}
        return ((entry, kind) for entry in entries.values() if (kind := _kind_of(entry)))

    async def find(self, name: str, kind: type[T], size_bytes: int) -> T:
        """Return the model of this name, loaded for a request that holds so many bytes.

        Raise a NotFound if it is not ready, or does something else, and as :meth:`LoadWaits.ready`.
        """
        if self._listed(name)[1] is kind:
            found = text_model(await self._models.ready(name, "", size_bytes))
            if isinstance(found, kind):
                return found
        given, fix = Raw(f"a model without {DOES[kind]}"), "GET /v1/models says what each model does."
        raise NotFound(f"model {name!r}", given=given, expected=self._known(kind), fix=fix)

    async def only(self, kind: type[T], size_bytes: int) -> T:
        """Return the one model of a kind as :meth:`find`; raise a NotFound if there are none or several."""
        found = [entry for entry, one in self if one is kind]
        if len(found) == 1:
            return await self.find(found[0].name, kind, size_bytes)
        given, fix = Raw("no name"), "Name one of them; GET /v1/models says what each model does."
        raise NotFound("model", given=given, expected=self._known(kind), fix=fix)

    def get(self, name: str) -> tuple[Entry, type[TextModel]]:
        """Return the model of this name; raise a NotFound if it is not ready, or reads no texts of such clients."""
        entry, kind = self._listed(name)
        if kind:
            return entry, kind
        given, expected = Raw("a model that does nothing with texts"), _list([entry.name for entry, _ in self])
        raise NotFound(f"model {name!r}", given=given, expected=expected, fix="GET /v1/models lists them.")

    def _known(self, kind: type[TextModel]) -> str:
        return _list([entry.name for entry, one in self if one is kind])

    def _listed(self, name: str) -> tuple[Entry, type[TextModel] | None]:
        """Return the entry of a model that is ready, or that a request would load, and what it does with texts."""
        try:
            entry, _ = self._repository.ready(name, "")
        except NotLoaded as missing:
            entry = missing.entry
        return entry, _kind_of(entry)


def text_model(model: Model) -> TextModel | None:
    """Return what a model does with texts; None if it reads none, or its answers are no text, vector or score."""
    manifest, step, kind = model.manifest, model.step, _kind_in(model.manifest)
    if not kind:
        return None
    assert isinstance(step, TokenizerPreprocessor)
    config, program, after, first = step.config, manifest.program, manifest.postprocess, manifest.outputs[0]
    if isinstance(program, GenerateProgram):
        assert isinstance(model.program, Generate)
        names = (config.input, config.ids, config.mask, program.text, program.generated)
        return TextGenerator(model, step, *names, model.program.tokenizer)
    if isinstance(after, ScorePostprocess):
        return Reranker(model, step, after.output)
    return Embedder(model, step, first.name, first.shape[1])


def _kind_of(entry: Entry) -> type[TextModel] | None:
    manifest = entry.model.manifest if entry.model else entry.manifest
    return _kind_in(manifest) if manifest else None


def _kind_in(manifest: Manifest) -> type[TextModel] | None:
    if not isinstance(manifest.preprocess, TokenizerPreprocess):
        return None
    config, after, first = manifest.preprocess, manifest.postprocess, manifest.outputs[0]
    if isinstance(manifest.program, GenerateProgram):
        return TextGenerator
    if isinstance(after, ScorePostprocess) and config.pair:
        return Reranker
    is_embedding = first.name in _EMBEDDINGS or manifest.space
    if len(manifest.outputs) > 1 or not is_embedding or after or config.pair or not manifest.max_batch_size:
        return None
    is_vector = first.datatype == "FP32" and len(first.shape) == 2 and first.shape[1] > 0
    return Embedder if is_vector else None


def _list(names: list[str]) -> str:
    return f"one of: {', '.join(names) or 'none at all'}"
