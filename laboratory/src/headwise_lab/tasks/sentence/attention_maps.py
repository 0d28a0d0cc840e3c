"""Where the heads of a trained classifier of texts attend: maps of a few texts, and how often heads agree on a word."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headwise.errors import DataError
from headwise.texts.batching import batch_by_length
from headwise_lab.experiment.evaluation import spread_evenly
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.tasks.sentence.data import SentenceData
from headwise_lab.tasks.sentence.model import SelfAttentive
from headwise_lab.training.trained import load_trained

TEXTS = 3
# Length in words of the texts shown, similar to the paper's review.
SHORTEST, LONGEST = 20, 40
COUNTED = 500
BATCH = 128


def measure_attention(settings: RunSettings, folder: Path) -> dict[str, Any]:
    """Return the attention of each head over a few test texts, and how much heads agree on their top words.

    "heads_on_one_word" is the largest share of heads whose greatest weight is on the same word, and "different_words"
    the number of words with some head's greatest weight, both as means over test texts.

    Raises:
        DataError: No test text is long enough.
    """
    trained = load_trained(settings, folder)
    model, data = trained.model, trained.data
    assert isinstance(model, SelfAttentive)
    counted = spread_evenly(len(data.test), COUNTED)
    found = []
    with torch.no_grad():
        for batch in batch_by_length(data.test.lengths[counted], BATCH):
            found += [count_agreement(_read_weights(model, data, int(number))) for number in counted[batch].tolist()]
        maps = [_map_text(model, data, number) for number in choose_texts(data)]
    shares, words = np.array(found, dtype=np.float64).mean(axis=0).tolist()
    return {"numbers": {"heads_on_one_word": shares, "different_words": words}, "maps": maps}


def count_agreement(weights: NDArray[np.float64]) -> tuple[float, int]:
    """Return the largest share of heads with the same top word, and the number of top words, of weights [H, L].

    >>> count_agreement(np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]]))
    (0.75, 2)
    """
    counts = np.bincount(weights.argmax(axis=1))
    return float(counts.max() / len(weights)), int((counts > 0).sum())


def choose_texts(data: SentenceData) -> list[int]:
    """Return the test texts to show: the first of 20 to 40 words in the second to last class (four of five stars).

    Raises:
        DataError: No test text has such a length.
    """
    lengths, wanted = data.test.texts[0].lengths, max(0, len(data.labels) - 2)
    inside = np.flatnonzero((lengths >= SHORTEST) & (lengths <= LONGEST))
    if not len(inside):
        raise DataError(f"no test text has {SHORTEST} to {LONGEST} words; name other data.")
    ordered = sorted(inside.tolist(), key=lambda place: (int(data.test.labels[place]) != wanted, place))
    return ordered[:TEXTS]


def _map_text(model: SelfAttentive, data: SentenceData, place: int) -> dict[str, Any]:
    number = int(data.test.numbers[place])
    logits = model.logits(
        _read_tokens(model, data, place, 0), _read_tokens(model, data, place, 1) if data.pairs else None
    )
    return {
        "words": data.words.words(number),
        "weights": _read_weights(model, data, place).tolist(),
        "label": data.labels[int(data.test.labels[place])],
        "predicted": data.labels[int(logits.argmax())],
    }


def _read_weights(model: SelfAttentive, data: SentenceData, place: int) -> NDArray[np.float64]:
    return model.attend(_read_tokens(model, data, place, 0))[1][0].double().cpu().numpy()


def _read_tokens(model: SelfAttentive, data: SentenceData, place: int, text: int) -> torch.Tensor:
    device = next(model.parameters()).device
    return torch.tensor([data.test.texts[text][place]], device=device)
