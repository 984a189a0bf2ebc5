"""Sums modulo 10 as a module of the mathematics dataset, and random language models for them."""

from functools import cache

import numpy as np

from export.generate.model import save_backbone
from export.generate.tokenizer import train_characters
from tests.support.language_models import tiny_gpt2

POSITIONS = 40


@cache
def sums_tokenizer():
    return train_characters(["Question: \nAnswer: #### ?and0123456789"])


def write_sums(place):
    """Write the module, with two training splits and a test split, and return its directory."""
    generator = np.random.default_rng(0)
    pairs = [divmod(int(number), 30) for number in generator.permutation(900)]
    for split, some in (("train-easy", pairs[:60]), ("train-hard", pairs[60:120]), ("interpolate", pairs[120:150])):
        path = place / split / "sums.txt"
        path.parent.mkdir()
        path.write_text("".join(f"{a} and {b}?\n{(a + b) % 10}\n" for a, b in some))
    return place


def write_backbone(path, *, seed=0):
    """Write a language model, and return its directory."""
    save_backbone(tiny_gpt2(seed, POSITIONS, sums_tokenizer()), sums_tokenizer(), path)
    return path
