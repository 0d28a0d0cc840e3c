"""The cache of encoded sentences: padding on the left, damage, two at once, and who may read it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from headwise.errors import DataError, LayoutError
from headwise.texts.frozen import Frozen
from headwise_lab.frozen.open import open_frozen
from headwise_lab.frozen.vectors import Shape, encodings, find_shape
from lab.cli.tiny_models import write_models
from lab.tasks.classification.probing_toy import write_bert, write_gpt2

SENTENCES = ["the film walked .", "a town", "it sees the stone near the plot here once .", "rain goes"]


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Frozen:
    return open_frozen(write_bert(tmp_path_factory.mktemp("models") / "bert"))


def test_a_sentence_has_its_vectors_whatever_stands_beside_it_though_the_tokenizer_pads_on_the_left(tmp_path):
    gpt2 = open_frozen(write_gpt2(tmp_path / "gpt2"))
    together = encodings(gpt2, SENTENCES, tmp_path / "cache", model="m")
    assert together.layers is not None
    for place, sentence in enumerate(SENTENCES):
        alone = encodings(gpt2, [sentence], tmp_path / "cache", model="m")
        assert alone.layers is not None
        np.testing.assert_allclose(together.layers[:, place], alone.layers[:, 0], atol=1e-5)
        for one, other in zip(together.heads, alone.heads, strict=True):
            np.testing.assert_allclose(one[place], other[0], atol=1e-5)


def test_layers_and_heads_are_known_before_anything_is_encoded(frozen):
    assert find_shape(frozen) == Shape(2, (3, 3))
    with pytest.raises(DataError, match="bert reads no sentences; expected a folder of Hugging Face, or a run of"):
        find_shape(dataclasses.replace(frozen, lines=lambda _path: []))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def of_fewer(path: Path) -> None:
    np.save(path, np.zeros((len(SENTENCES) - 1, 24), dtype=np.float32))


def of_another_width(path: Path) -> None:
    np.save(path, np.zeros((len(SENTENCES), 23), dtype=np.float32))


DAMAGES = [
    ("layers.npy", cut),
    ("layers.npy", emptied),
    ("heads-1.npy", Path.unlink),
    ("heads-0.npy", of_fewer),
    ("heads-0.npy", of_another_width),
    ("shapes.json", emptied),
    ("shapes.json", lambda path: path.write_text("3")),
]


def test_a_damaged_cache_is_made_again_and_everybody_may_read_it(frozen, tmp_path):
    first = encodings(frozen, SENTENCES, tmp_path, model="m")
    layers, heads = np.array(first.layers), [np.array(one) for one in first.heads]
    (place,) = tmp_path.iterdir()
    assert place.stat().st_mode & 0o555 == 0o555
    for name, damage in DAMAGES:
        damage(place / name)
        again = encodings(frozen, SENTENCES, tmp_path, model="m")
        assert np.array_equal(layers, again.layers), name
        assert all(np.array_equal(one, other) for one, other in zip(heads, again.heads, strict=True)), name
        assert [*tmp_path.iterdir()] == [place]


def test_a_tokenizer_without_a_longest_text_and_a_model_without_layers_are_refused(tmp_path):
    folder = write_bert(tmp_path)
    path = folder / "tokenizer_config.json"
    kept = path.read_text()
    for length in ([], "", True, 0, float("inf")):
        path.write_text(json.dumps({**json.loads(kept), "model_max_length": length}))
        with pytest.raises(DataError, match=re.escape(f"{path}: model_max_length is {length!r}; expected a number")):
            open_frozen(folder)
    path.write_text(kept)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 0}))
    with pytest.raises(LayoutError, match=re.escape(f"{folder}: ")):
        open_frozen(folder)


@pytest.mark.full
def test_a_model_that_takes_no_tokens_or_fails_on_a_text_is_refused_by_folder(tmp_path):
    folder = write_models(tmp_path) / "llama"
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "max_position_embeddings": -5}))
    with pytest.raises(DataError, match=re.escape(f"{path}: max_position_embeddings is -5; expected at least 3; copy")):
        open_frozen(folder)
    sliding = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": -(2**63)}
    path.write_text(json.dumps({**config, **sliding}))
    with pytest.raises(DataError, match=re.escape(f"{path}: sliding_window is -{2**63}; expected at least 1, or")):
        open_frozen(folder)
    path.write_text(json.dumps(config))
    frozen = open_frozen(folder)
    frozen.model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(IndexError("out of range")))
    with pytest.raises(DataError, match=re.escape(f"{folder} holds a model that fails on a text (")):
        frozen.run(next(iter(frozen.read(["a b c"]))))
