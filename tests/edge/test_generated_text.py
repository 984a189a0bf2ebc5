"""The text of tokens that stand for bytes, which need not make up characters."""

import re
from io import StringIO
from itertools import groupby

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from edge.programs.generated_text import Pieces
from edge.programs.program import AppliedHead, Joining, Options
from edge.programs.sampling import Sampling
from edge.protocol import TOKEN_IDS
from tests.support.letters_model import LETTERS, continued, inputs_of, open_letters, write_letters_bundle

WORDS = ("\u2581he", "llo", "\u2581", "x", "\xe9")
#: Ids of bytes are the bytes.
VOCABULARY = {**{f"<0x{byte:02X}>": byte for byte in range(256)}, **{word: 256 + at for at, word in enumerate(WORDS)}}
END = len(VOCABULARY)


def by_bytes():
    tokenizer = Tokenizer(models.BPE(VOCABULARY, [], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def readings(parts):
    """Return the texts of tokens for bytes and of others: bytes that are no characters, and perhaps others beside them,
    are replaced. At the end of a text, they may be left out.
    """
    runs = [(kind, list(run)) for kind, run in groupby(parts, key=type)]
    pattern = ""
    for place, (kind, run) in enumerate(runs):
        text = b"".join(run).decode(errors="replace") if kind is bytes else "".join(run)
        if kind is str or "\ufffd" not in text:
            pattern += re.escape(text)
        else:
            pattern += f"[{re.escape(text)}]" + ("*" if place == len(runs) - 1 else "+")
    return re.compile(pattern, re.DOTALL)


Tokens = st.lists(
    st.one_of(
        st.integers(256, END - 1),
        st.integers(0x41, 0xFF),
        st.sampled_from(["\u04f9", "\u4e39", "\U0001f600"]).map(lambda text: list(text.encode())),
    ),
    max_size=40,
).map(lambda parts: [token for part in parts for token in (part if isinstance(part, list) else [part])])


@settings(max_examples=300, deadline=None)
@given(Tokens)
@example([0xD3, 0xB9, 0xFF, VOCABULARY["x"]])  # the character before the last byte is no part of the decoded whole
@example([VOCABULARY["x"], *[0xFF] * 20, VOCABULARY["\u2581he"]])
def test_pieces_of_any_bytes_make_up_the_text(tokens):
    tokenizer = by_bytes()
    pieces = Pieces(tokenizer)
    text = "".join(map(pieces.add, tokens))
    whole = tokenizer.decode(tokens)
    parts = [bytes([token]) if token < 256 else WORDS[token - 256].replace("\u2581", " ") for token in tokens]
    if parts and isinstance(parts[0], str):
        parts[0] = parts[0].removeprefix(" ")
    assert readings(parts).fullmatch(whole)
    assert readings(parts).fullmatch(text)
    if "\ufffd" not in whole:
        assert text == whole


def test_pieces_of_endless_bytes_come_while_it_goes_on():
    pieces = Pieces(by_bytes())
    assert "".join(pieces.add(0xFF) for _ in range(100)) >= "\ufffd" * 80


#: Letters that stand for bytes. The greedy text after "abc" has none of them.
SPELLING = {
    letter: bytes([byte])
    for letter, byte in zip("ghjkmnpqrst", b"\xd3\xb9\xff\xe4\xb8\xad\xf0\x9f\x98\x80\xc3", strict=True)
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bytes") / "letters"
    bundle = write_letters_bundle(directory, spelling=SPELLING, byte_fallback=True, failing="")
    with open_letters(bundle, tmp_path_factory.mktemp("cache")) as program:
        yield program


def options(max_tokens, **how):
    return Options("full", sampling=Sampling(max_tokens, logprobs=True, ignore_eos=True, **how))


def texts(computed):
    return [text.decode() for text in computed.outputs["text"][:, 0]]


@pytest.mark.parametrize("seed", range(2))
def test_texts_of_any_bytes_leave_others_alone(model, seed):
    session = model.session(options(1))
    session.add([Joining("greedy", inputs_of("abc"), options(60))])
    session.add([Joining("random", inputs_of("ab", "de", "i"), options(80, temperature=100.0, seed=seed))])
    ended = {}
    seen = [[], [], []]
    while session.rows:
        ended |= {one.key: one for one in session.step()}
        if "random" not in ended:
            for pieces, piece in zip(seen, texts(session.partial("random")), strict=True):
                pieces.append(piece)
    greedy, random = ended["greedy"], ended["random"]
    assert not greedy.error
    assert not random.error
    assert texts(greedy.computed) == [continued("abc", 60)]
    session = model.session(options(1))
    session.add([Joining("random", inputs_of("ab", "de", "i"), options(80, temperature=100.0, seed=seed))])
    whole = []
    while not whole:
        whole = session.step()
    computed = whole[0].computed
    for pieces, last, text, ids in zip(
        seen, texts(random.computed), texts(computed), computed.outputs[TOKEN_IDS].tolist(), strict=True
    ):
        assert "".join(pieces) + last == text
        assert len(ids) == 80
        parts = [SPELLING.get(LETTERS[token], LETTERS[token]) for token in ids if token]
        assert readings(parts).fullmatch(text)


class Counting(StringIO):
    read_chars = 0

    def read(self, size=-1):
        text = super().read(size)
        self.read_chars += len(text)
        return text


@pytest.mark.parametrize("streamed", [True, False])
def test_work_for_a_text_grows_in_proportion_to_its_length(model, streamed):
    def work(tokens):
        session = model.session(options(1))
        session.add([Joining("", inputs_of("abc"), options(tokens, stop=("never", "nor this one")))])
        (row,) = session._requests[""]
        row._text, text = Counting(row._text.getvalue(), newline=""), ""
        values, ended = 0, []
        while not ended:
            outputs = session.partial("").outputs if streamed else {}
            text += outputs["text"].item().decode() if streamed else ""
            values += sum(array.size for array in outputs.values())
            ended = session.step()
        text += texts(ended[0].computed)[0]
        assert text == continued("abc", tokens)
        return values + row._text.read_chars + len(text)

    assert work(100) <= 2.2 * work(50)


class Broken:
    """Something that a row calls, with an error of its own."""

    def __call__(self, *arguments):
        raise ZeroDivisionError

    add = move = __call__


@pytest.mark.parametrize("broken", ["_pieces", "choose", "head", "new_text"])
def test_a_text_with_an_unexpected_error_ends_alone(model, caplog, broken):
    session = model.session(options(1))
    session.add(
        [Joining("good", inputs_of("abc"), options(9)), Joining("bad", inputs_of("abc"), options(5, temperature=1.0))]
    )
    bad = session._requests["bad"][0]
    setattr(bad, broken, AppliedHead(Broken(), 1.0) if broken == "head" else Broken())
    finished = []
    while not finished:
        finished += session.step()
    (ended,) = finished
    assert (ended.key, session.rows) == ("bad", 1)
    assert str(ended.error) == (
        "text: got ZeroDivisionError, expected a next token and what it adds. "
        "See the log of the server, and export the model again."
    )
    assert "ZeroDivisionError" in caplog.text
    while session.rows:
        finished += session.step()
    assert texts(finished[1].computed) == [continued("abc", 9)]


def test_text_that_begins_anew_goes_on_where_it_was(model):
    handed_out = []
    request = Joining("", inputs_of("abc"), options(20), handed_out)
    for steps, seen in ((5, 6), (3, 0)):
        session = model.session(options(1))
        session.add([request])
        for _ in range(steps):
            session.step()
        outputs = session.partial("").outputs
        assert (outputs["text"].item().decode(), outputs[TOKEN_IDS].size) == (continued("abc", 20)[:seen], seen)
    while not (ended := session.step()):
        pass
    assert texts(ended[0].computed) == [continued("abc", 20)[6:]]
    assert ended[0].computed.outputs[TOKEN_IDS].shape == (1, 14)
