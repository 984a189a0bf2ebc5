"""Sessions of generated text, and continuous batching of them, step by step."""

import time
from collections import deque

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edge.errors import DeadlineExceeded, InvalidRequest, RunnerError
from edge.programs import generate
from edge.programs.generate import PROMPT_TOKENS
from edge.programs.program import AppliedHead, Computed, Joining, Options
from edge.programs.sampling import Sampling
from edge.protocol import STOPPED
from edge.scheduling.batching import BatchAssembler
from edge.scheduling.continuous import ContinuousRun
from edge.scheduling.job import Job
from edge.scheduling.runs import Runs
from edge.scheduling.tier_executor import LoopExecutor, TextExecutor
from tests.support.letters_model import (
    BYTES,
    FAILING,
    MAX_BATCH_SIZE,
    POSITIONS,
    continued,
    inputs_of,
    open_letters,
    spelt,
    write_letters_bundle,
)
from tests.support.loop_model import XS, prompt

#: The sum of its letters makes a text that goes on; that of "m" reaches the failing letter after two.
GOES_ON, FAILS_LATER = "abc", "m"


def options(max_tokens=12, **how):
    sampling = Sampling(max_tokens, **how)
    return Options("full", sampling=sampling)


def texts(computed):
    return [text.decode() for text in computed.outputs["text"][:, 0]]


def facts(computed):
    return texts(computed), computed.outputs["generated"].tolist(), computed.facts[STOPPED].tolist()


def alone(letters, inputs, how):
    """Return what a request gets alone, None for an error."""
    try:
        return facts(letters.compute(inputs, how))
    except RunnerError:
        return None


def test_texts_end_by_their_last_token_or_by_length(letters):
    long = (GOES_ON * POSITIONS)[: POSITIONS - 3]
    computed = letters.compute(inputs_of(GOES_ON, "sh", long), options(7))
    assert texts(computed) == [continued(GOES_ON, 7), "", continued(long, 7)]
    assert computed.outputs["generated"].tolist() == [[7], [1], [3]]  # the end counts, and positions are limited
    assert computed.facts[STOPPED].tolist() == ["length", "stop", "length"]
    assert computed.facts[PROMPT_TOKENS].tolist() == [3, 2, POSITIONS - 3]


Prompts = st.lists(st.text("abcefhil", min_size=1, max_size=40), min_size=1, max_size=2)
Ways = st.one_of(
    st.builds(options, st.integers(1, 9)),
    st.builds(options, st.integers(1, 30), temperature=st.just(1.0), seed=st.integers(0, 9), top_k=st.integers(0, 5)),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(Prompts, Ways, st.integers(0, 3)), max_size=10), st.sets(st.integers(0, 9)))
def test_texts_are_those_of_requests_alone(letters, requests, dropped):
    session, ended, given_inputs = letters.session(options()), {}, {}
    for key, (prompts, how, steps) in enumerate(requests):
        given_inputs[key] = inputs_of(*prompts)
        ended.update({one.key: one for one in session.add([Joining(key, given_inputs[key], how)])})
        for _ in range(steps):
            ended.update({one.key: one for one in session.step()})
        if key in dropped:
            session.drop(key)
    while session.rows:
        ended.update({one.key: one for one in session.step()})
    assert ended.keys() | dropped >= set(range(len(requests)))
    for key, one in ended.items():
        found = None if one.error else facts(one.computed)
        assert found == alone(letters, given_inputs[key], requests[key][1])


def test_request_with_a_failing_row_leaves_alone(letters):
    session = letters.session(options())
    ended = session.add([Joining("good", inputs_of(GOES_ON, "ab"), options())])
    ended += session.add(
        [Joining("prompt", inputs_of("ab", FAILING), options()), Joining("beside", inputs_of("ah"), options())]
    )
    assert [(one.key, str(one.error)) for one in ended] == [
        ("prompt", "decoder: got logits that are not finite, expected finite logits to choose a token from. "
        "Usual causes are FP16 and a broken export.")
    ]  # fmt: skip
    assert session.rows == 3
    assert session.add([Joining("later", inputs_of("ab", FAILS_LATER), options())]) == []
    assert (session.step(), session.rows) == ([], 5)
    (later,) = session.step()
    assert (later.key, type(later.error), session.rows) == ("later", RunnerError, 3)
    while session.rows:
        ended += session.step()
    assert {one.key: texts(one.computed) for one in ended[1:]} == {
        "good": [continued(GOES_ON), continued("ab")],
        "beside": [continued("ah")],
    }


def test_long_prompts_are_computed_in_several_runs(letters, monkeypatch):
    monkeypatch.setattr(generate, "_MOST_JOINED", 64)
    session, shapes = letters.session(options()), []
    session.add([Joining("first", inputs_of(GOES_ON), options())])
    decoder = session._decoder
    add = decoder.add

    def recorded(tokens, lengths):
        shapes.append(tokens.shape)
        if lengths.max() > 50:
            raise RunnerError("decoder", given=50, expected="less", fix="None.")
        return add(tokens, lengths)

    monkeypatch.setattr(decoder, "add", recorded)
    long = [GOES_ON * 7, "ab" * 10, "c" * 4, "de", "i" * 25]
    assert session.add([Joining("long", inputs_of(*long), options())]) == []
    assert shapes == [(2, 25), (2, 25), (1, 25)]
    with pytest.raises(RunnerError):  # after the runs of the first two
        session.add([Joining("wrong", inputs_of("a" * 26, "b", "c" * 51), options())])
    assert session.rows == 6
    ended = []
    while session.rows:
        ended += session.step()
    assert {one.key: texts(one.computed) for one in ended} == {
        "first": [continued(GOES_ON)],
        "long": [continued(one) for one in long],
    }


class Failing:
    def move(self, logits, alpha):
        if not alpha.all():
            raise RunnerError("head", given=0, expected="an answer", fix="None.")
        return logits


def test_head_that_fails_ends_its_own_texts_alone(letters):
    session, head = letters.session(options()), Failing()
    session.add([Joining("plain", inputs_of(GOES_ON), options())])
    broken = options()._replace(head=AppliedHead(head, 0.0))
    (ended,) = session.add([Joining("broken", inputs_of("de"), broken)])
    assert (ended.key, ended.error and ended.error.subject) == ("broken", "head")
    later = options()._replace(head=AppliedHead(head, 1.0))
    assert session.add([Joining("later", inputs_of("de"), later)]) == []
    session._rows[-1].alpha = 0.0
    (ended,) = session.step()
    assert (ended.key, ended.error is None, session.rows) == ("later", False, 1)
    finished = []
    while not finished:
        finished = session.step()
    assert texts(finished[0].computed) == [continued(GOES_ON)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("cfloux", min_size=1, max_size=4), max_size=4))
@example(["lx", "flxz"])
def test_partial_texts_contain_no_part_of_a_stop_text(letters, stops):
    whole = continued(GOES_ON)  # flxuocflxuoc
    ends = [len(whole)] + [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    cut = min([whole[: min(ends)].find(stop) for stop in stops if stop in whole[: min(ends)]], default=len(whole))
    session = letters.session(options())
    ended = session.add([Joining("", inputs_of(GOES_ON), options(stop=tuple(stops)))])
    seen = [""]
    while not ended:
        seen.append(seen[-1] + texts(session.partial(""))[0])
        ended = session.step()
    assert [seen[-1] + text for text in texts(ended[0].computed)] == [whole[:cut]]
    assert ended[0].computed.facts[STOPPED] == ["stop" if cut < len(whole) else "length"]
    for tokens, text in enumerate(seen[1:], 1):
        ends = [whole[place:tokens] for place in range(tokens)]
        held = [len(end) for end in ends if any(stop.startswith(end) for stop in stops)]
        assert len(text) == tokens - max(held, default=0)


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "f"), (2, "f"), (3, "flxuocf"), (10, "flxuocflxuoc")])
def test_stop_texts_begin_after_the_fewest_tokens(letters, min_tokens, text):
    computed = letters.compute(inputs_of(GOES_ON), options(stop=("lx",), min_tokens=min_tokens))
    assert texts(computed) == [text]


def test_a_text_with_fewest_tokens_leaves_others_alone(letters):
    session = letters.session(options())
    finished = session.add([Joining("later", inputs_of("yb"), options(6, min_tokens=2))])
    finished += session.add([Joining("at once", inputs_of("sh"), options())])
    while session.rows:
        finished += session.step()
    found = {one.key: facts(one.computed) for one in finished}
    assert found["at once"] == ([""], [[1]], ["stop"])
    assert found["later"] == (["a" + continued("yba", 5)], [[6]], ["length"])


def test_a_part_of_a_stop_text_is_shown_at_the_end(letters):
    session = letters.session(options())
    session.add([Joining("", inputs_of(GOES_ON), options(stop=("flz",)))])
    session.step()
    assert [texts(session.partial("", stopped)) for stopped in ("", "deadline")] == [[""], ["fl"]]


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory):
    bundle = write_letters_bundle(tmp_path_factory.mktemp("bytes") / "letters", spelling=BYTES)
    with open_letters(bundle, tmp_path_factory.mktemp("cache")) as program:
        yield program


@pytest.mark.parametrize("start", ["abc", "dh", "c", "i"])
def test_characters_of_several_bytes_are_never_cut(bytes_model, start):
    for tokens in range(1, 12):
        session = bytes_model.session(options())
        ended = session.add([Joining("", inputs_of(start), options(tokens))])
        text = ""
        while not ended:
            text += texts(session.partial(""))[0]
            ended = session.step()
        text += texts(ended[0].computed)[0]
        whole = spelt(continued(start, tokens), BYTES).decode(errors="replace")
        assert text == whole.rstrip("\ufffd")
        assert bytes_model.compute(inputs_of(start), options(tokens)).outputs["text"].item().decode() == text


# In the scheduler.


@pytest.fixture
def run(letters, letters_bundle):
    return run_of(letters, letters_bundle)


def run_of(letters, bundle):
    assembler = BatchAssembler.of(bundle.manifest)
    executor = TextExecutor("full", letters, assembler, max_rows=MAX_BATCH_SIZE, model=bundle.manifest.name)
    return ContinuousRun(executor, Runs(1), 0, lambda: 0.0)


def job_of(run, *prompts, how=None, **fields):
    return Job(run.executor, inputs_of(*prompts), len(prompts), options=how or options(), **fields)


def answer_of(job):
    return facts(Computed(job.answer.outputs, job.answer.facts))


def test_first_token_is_sent_before_the_next_step(run):
    published = []
    job = job_of(run, GOES_ON, partials=deque(), publish=published.append)
    single = job_of(run, "ab", how=options(1), partials=deque(), publish=published.append)
    assert run.admit([job, single]) == [single]  # which needs no step
    assert (published, answer_of(single)) == ([job], (["c"], [[1]], ["length"]))
    assert job.partials.popleft().outputs["text"].tolist() == [[b"f"]]
    run.step()
    assert [answer.outputs["text"].tolist() for answer in job.partials] == [[[b"l"]]]  # what is new
    assert published == [job, job]  # when there was none


def test_first_partial_answer_of_a_loop_follows_a_step(loop):
    run = ContinuousRun(LoopExecutor("full", loop, BatchAssembler(XS, {}), max_rows=4), Runs(1), 0, lambda: 0.0)
    job = Job(run.executor, {"xs": prompt(1)}, 1, partials=deque(), deadline=time.monotonic() + 60)
    job.best_effort = True
    run.admit([job])
    assert not job.partials
    job.deadline = time.monotonic() - 1
    assert run.step() == [job]
    assert isinstance(job.error, DeadlineExceeded)


def test_failing_text_fails_alone(run, caplog):
    good, late = job_of(run, GOES_ON), job_of(run, FAILS_LATER)
    assert run.admit([good, late, bad := job_of(run, FAILING)]) == [bad]
    ended = [run.step() for _ in range(11)]
    assert [len(one) for one in ended] == [0, 1] + [0] * 8 + [1]  # nobody begins anew
    assert (ended[1], type(late.error), answer_of(good)[0]) == ([late], RunnerError, [continued(GOES_ON)])
    assert not caplog.records
    assert run.executor.failures.count == 0  # the last request succeeded


def test_stream_that_fails_between_two_steps_fails_alone(run, monkeypatch):
    good, bad = (job_of(run, GOES_ON, partials=deque()) for _ in range(2))
    run.admit([good, bad])
    session = run._batch.session
    monkeypatch.setattr(session._requests[bad][0], "new_text", lambda: 1 / 0)
    assert run.step() == [bad]
    assert isinstance(bad.error, ZeroDivisionError)
    while run.jobs:
        run.step()
    assert "".join([*(part.outputs["text"].item().decode() for part in good.partials or ()), *answer_of(good)[0]]) == (
        continued(GOES_ON)
    )


def test_cancelled_text_frees_its_place_at_once(run):
    jobs = [job_of(run, GOES_ON, "ab"), job_of(run, "c"), job_of(run, "i")]
    run.admit(jobs)
    assert run.room == 0
    jobs[0].cancelled = True
    assert (run.step(), run.room) == ([jobs[0]], 2)
    run.admit([late := job_of(run, "abciabc", "f")])
    while run.jobs:
        run.step()
    assert jobs[0].answer is None
    assert [answer_of(job)[0] for job in jobs[1:]] == [[continued("c")], [continued("i")]]
    assert answer_of(late)[0] == [continued("abciabc"), continued("f")]


def test_deadline_ends_a_text_with_an_error_or_with_what_there_is(run):
    later = time.monotonic() + 60
    strict, lenient, at_once = (job_of(run, GOES_ON, deadline=later) for _ in range(3))
    lenient.best_effort = at_once.best_effort = True
    run.admit([strict, lenient, beside := job_of(run, "ab")])
    run.step()
    strict.deadline = lenient.deadline = time.monotonic() - 1
    assert run.step() == [strict, lenient]
    assert isinstance(strict.error, DeadlineExceeded)
    assert answer_of(lenient) == (["fl"], [[2]], ["deadline"])
    run.admit([at_once])
    at_once.deadline = time.monotonic() - 1
    assert run.step() == [at_once]
    assert answer_of(at_once) == (["f"], [[1]], ["deadline"])  # its first token
    while run.jobs:
        run.step()
    assert answer_of(beside)[0] == [continued("ab")]


def test_texts_begin_anew_when_a_step_fails(tmp_path, caplog):
    bundle = write_letters_bundle(tmp_path / "letters", positions=2 * POSITIONS)  # more than the graph has
    with open_letters(bundle, tmp_path / "cache") as letters:
        run = run_of(letters, bundle)
        good, bad = job_of(run, GOES_ON, "ab", how=options(20)), job_of(run, "ab" * 47)
        run.admit([good, bad])
        while run.jobs:
            run.step()
        assert isinstance(bad.error, InvalidRequest)
        assert "a session of 2 requests to letters failed; each begins anew, alone" in caplog.text
        assert answer_of(good)[0] == [continued(GOES_ON, 20), continued("ab", 20)]
        used = letters.cache_bytes
        assert run.admit([job_of(run, GOES_ON)]) == []
        assert letters.cache_bytes == used > 0  # a decoder without rows is used again


def test_texts_that_end_when_rows_cannot_leave_lose_nothing(run, monkeypatch):
    jobs = [job_of(run, "ab"), job_of(run, GOES_ON)]
    run.admit(jobs)
    session = run._batch.session
    monkeypatch.setattr(session._decoder, "keep", lambda *_: 1 / 0)
    while run.jobs:
        run.step()
    assert [answer_of(job)[0] for job in jobs] == [[continued("ab")], [continued(GOES_ON)]]
