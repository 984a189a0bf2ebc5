"""Runs measured on sets, and compared with the first of them on the same items."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from edge.datatypes import Array
from edge.errors import Raw, UsageError
from export.data.examples import Examples
from export.data.unlabelled import sample_texts
from export.finetune.predictions import METRICS
from export.report.embeddings import Group
from export.report.embeddings.embed import EmbeddingRun, embed
from export.report.embeddings.published import COMPLETE, published
from export.report.embeddings.records import COSINE, RunRecord, Score, Side
from export.report.embeddings.sets import Probe, Sets, columns
from export.report.speed import speed_of
from export.training.intervals import Difference, Sample, mean, resampled

#: Sets whose mean is a measure of its own, where all are there.
_AVERAGED = ("STS13", "STS14", "STS15", "STS-B dev")
#: Documents that count as found, and questions whose similarities to all documents are in memory at a time.
_FOUND, _CHUNK = 10, 256
#: Least mean cosine to the original of a tier whose embeddings are compared with the original's.
_LEAST_COSINE = 0.5
#: Inverse strength of the probes' L2 penalty, for features of variance 1.
_INVERSE_PENALTY = 0.01


class _Measured(NamedTuple):
    """A score, still without its difference, and its resamples."""

    score: Score
    sample: Sample

    @property
    def key(self) -> tuple[str, str, str]:
        return self.score.group, self.score.items, self.score.measure


class _Vectors(NamedTuple):
    """Embeddings of questions and of documents, by the name of the set, and of the further passages."""

    questions: dict[str, Array]
    documents: dict[str, Array]
    passages: Array


class _Ranks(NamedTuple):
    """The rank of the right document for each question, from 1, [n], and the number of all documents."""

    ranks: Array
    documents: int


def space_errors(runs: Sequence[EmbeddingRun]) -> dict[str, UsageError]:
    """Return why runs do not have the embedding space of the first, by name: by their records and embeddings."""
    original, texts = runs[0], [text for (text,) in sample_texts(pair=False)]
    wanted = embed(original, texts, None)
    fix = (
        "Mix tiers that 'fewheads reduce' made of the original, and restored with --distil; or leave 'mixed' out of "
        "--only."
    )
    found = dict[str, UsageError]()
    for run in runs[1:]:
        if run.model.width != original.model.width:
            given, expected = Raw(f"embeddings of {run.model.width} numbers"), f"{original.model.width}"
        elif run.space and original.space and run.space != original.space:
            given, expected = Raw(f"the space {run.space}"), original.space
        else:
            cosine = float((embed(run, texts, None) * wanted).sum(axis=1).mean())
            if cosine >= _LEAST_COSINE:
                continue
            given = Raw(f"a mean cosine of {cosine:.2f} to {original.name} on the same texts")
            expected = f"{_LEAST_COSINE} at least, as of its tiers"
        found[run.name] = UsageError(f"run {run.name} in a mixed index", given=given, expected=expected, fix=fix)
    return found


def evaluate(
    runs: Sequence[EmbeddingRun],
    sets: Sets,
    cache: Path | None,
    on_texts: Callable[[int, int, str], None] = lambda done, texts, run: None,
    *,
    other_space: Collection[str] = (),
) -> list[RunRecord]:
    """Measure runs, the first of which is the original that the others are compared with.

    Args:
        cache: directory for the embeddings; None keeps none.
        on_texts: called with the texts that are embedded, all of them, and the name of the run.
        other_space: names of runs that are not measured in a mixed index, such as those of :func:`space_errors`.
    """
    mixed = {run.name for run in runs} - {*other_space} if "mixed" in sets.groups else set()
    done = 0
    base: dict[tuple[str, str, str], Sample] = {}
    records, original = [], None
    for run in runs:

        def of(texts: Sequence[str], run: EmbeddingRun = run) -> Array:
            def count(number: int) -> None:
                nonlocal done
                done += number
                on_texts(done, sets.texts * len(runs), run.name)

            return embed(run, texts, cache, count)

        vectors = _vectors(sets, of)
        own = {name: _ranks(sets, name, vectors, vectors) for name in sets.questions}
        measured = [*_similarities(sets, of), *_retrieval(sets, own), *_probes(sets, of)]
        if len(mixed) > 1 and run.name in mixed:
            measured += _mixed(sets, vectors, original, own)
        if original is None:
            original, base = vectors, {one.key: one.sample for one in measured}
            measured = _with_published(run, measured)
        else:
            measured = [_compared(one, base) for one in measured]
        scores = tuple(one.score for one in measured)
        records.append(_record(run, sets, scores))
    return records


def _halves(examples: Examples, of: Callable[[Sequence[str]], Array]) -> list[Array]:
    return np.split(of(columns(examples)), len(examples.texts[0]))


def _vectors(sets: Sets, of: Callable[[Sequence[str]], Array]) -> _Vectors:
    questions = {name: of(task.questions) for name, task in sets.questions.items()}
    documents = {name: of(task.documents) for name, task in sets.questions.items()}
    return _Vectors(questions, documents, of(sets.passages.texts) if sets.passages.texts else np.empty((0, 0)))


def _similarities(sets: Sets, of: Callable[[Sequence[str]], Array]) -> Iterator[_Measured]:
    samples = {}
    for name, examples in sets.pairs.items():
        first, second = _halves(examples, of)
        samples[name] = _sample("spearman", (first * second).sum(axis=1), examples.targets, name)
        yield _measured("sts", name, "Spearman", len(examples.texts), samples[name])
    if samples.keys() >= {*_AVERAGED}:
        several = [samples[name] for name in _AVERAGED]
        average = Sample(*(np.mean([getattr(one, part) for one in several], axis=0) for part in Sample._fields))
        pairs = sum(len(sets.pairs[name].texts) for name in _AVERAGED)
        yield _measured("sts", f"mean of {', '.join(_AVERAGED)}", "Spearman", pairs, average)


def _retrieval(sets: Sets, own: Mapping[str, _Ranks]) -> Iterator[_Measured]:
    if "retrieval" in sets.groups:
        for name, (ranks, documents) in own.items():
            for measure, values in (
                (f"MRR@{_FOUND}", _reciprocal(ranks)),
                ("recall@1", ranks == 1),
                (f"recall@{_FOUND}", ranks <= _FOUND),
            ):
                yield _measured("retrieval", name, measure, len(ranks), _mean(100.0 * values), documents=documents)


def _mixed(sets: Sets, vectors: _Vectors, original: _Vectors | None, own: Mapping[str, _Ranks]) -> Iterator[_Measured]:
    if original is not None:
        for items, here, there in _shared(vectors, original):
            yield _measured("mixed", items, COSINE, len(here), _mean((here * there).sum(axis=1)))
    mixtures: list[tuple[Side, Side]] = [("run", "run")]
    if original is not None:
        mixtures = [("run", "original"), ("original", "run"), ("run", "run")]
    for name in sets.questions:
        for queries, index in mixtures:
            by = {"run": vectors, "original": original or vectors}
            is_own = queries == index == "run"
            ranks, documents = own[name] if is_own else _ranks(sets, name, by[queries], by[index])
            found = _measured("mixed", name, f"MRR@{_FOUND}", len(ranks), _mean(100 * _reciprocal(ranks)), documents)
            yield found._replace(score=msgspec.structs.replace(found.score, queries=queries, index=index))


def _shared(vectors: _Vectors, original: _Vectors) -> Iterator[tuple[str, Array, Array]]:
    """Yield what both embedded: the passages, or without them the documents of each set."""
    if len(vectors.passages):
        yield "passages", vectors.passages, original.passages
    else:
        for name, documents in vectors.documents.items():
            yield name, documents, original.documents[name]


def _ranks(sets: Sets, name: str, queries: _Vectors, index: _Vectors) -> _Ranks:
    """Return the ranks of a set.

    Of equally similar documents, the right one is the last, so that equal embeddings of all texts find nothing.
    """
    task = sets.questions[name]
    known = {*task.documents}
    fresh = np.array([text not in known for text in sets.passages.texts], dtype=bool)
    documents = index.documents[name]
    if fresh.any():
        documents = np.concatenate([documents, index.passages[fresh]])
    ranks = []
    for first in range(0, len(task.answers), _CHUNK):
        similar = queries.questions[name][first : first + _CHUNK] @ documents.T
        right = np.take_along_axis(similar, task.answers[first : first + _CHUNK, None], axis=1)
        ranks.append((similar >= right).sum(axis=1))
    return _Ranks(np.concatenate(ranks), len(documents))


def _reciprocal(ranks: Array) -> Array:
    return np.where(ranks <= _FOUND, 1 / ranks, 0.0)


def _probes(sets: Sets, of: Callable[[Sequence[str]], Array]) -> Iterator[_Measured]:
    for name, probe in sets.probes.items():
        answers = _probe(probe, of)
        sample = _sample(probe.metric, answers, probe.holdout.targets, name)
        yield _measured("probes", name, probe.metric, len(answers), sample)


def _probe(probe: Probe, of: Callable[[Sequence[str]], Array]) -> Array:
    """Return the classes of the held-out texts, by logistic regression on embeddings, of pairs on |a - b| and a b."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    train, holdout = (_features(_halves(part, of)) for part in (probe.train, probe.holdout))
    model = make_pipeline(StandardScaler(), LogisticRegression(C=_INVERSE_PENALTY, max_iter=1000))
    return np.asarray(model.fit(train, probe.train.targets).predict(holdout))


def _features(vectors: Sequence[Array]) -> Array:
    return (
        vectors[0] if len(vectors) == 1 else np.concatenate([np.abs(vectors[0] - vectors[1]), np.prod(vectors, 0)], 1)
    )


def _sample(metric: str, answers: Array, targets: Array, name: str) -> Sample:
    """Return a metric in points; the resamples of a set are its own, so that those of other sets are independent."""
    sample = Sample.of_answers(METRICS[metric], [answers], targets, draw=zlib.crc32(name.encode()))
    return Sample(100 * sample.by_seed, 100 * sample.drawn)


def _mean(values: Array) -> Sample:
    return Sample(np.array([values.mean()]), resampled(mean, values))


def _measured(
    group: Group, items: str, measure: str, n: int, sample: Sample, documents: int | None = None
) -> _Measured:
    value = sample.mean()
    return _Measured(Score(group=group, items=items, measure=measure, n=n, value=value, documents=documents), sample)


def _compared(one: _Measured, base: dict[tuple[str, str, str], Sample]) -> _Measured:
    if one.key not in base:  # the cosine to the original
        return one
    change = one.sample.paired(base[one.key]).mean()
    difference = Difference(change.value, change.interval)
    return one._replace(score=msgspec.structs.replace(one.score, difference=difference))


def _with_published(run: EmbeddingRun, measured: Sequence[_Measured]) -> list[_Measured]:
    known = published(run.model)

    def figure(score: Score) -> float | None:
        complete = score.group == "sts" and score.n == COMPLETE.get(score.items)
        return known.scores.get(score.items) if known and complete else None

    return [one._replace(score=msgspec.structs.replace(one.score, published=figure(one.score))) for one in measured]


def _record(run: EmbeddingRun, sets: Sets, scores: tuple[Score, ...]) -> RunRecord:
    return RunRecord(
        run=run.name,
        weights=run.weights,
        parameters=sum(parameter.numel() for parameter in run.model.parameters()),
        max_length=run.max_length,
        layers=run.architecture.transformer.layers,
        planned=run.config.planned,
        speed=speed_of(run.config, run.architecture),
        sets=sets.digests,
        scores=scores,
    )
