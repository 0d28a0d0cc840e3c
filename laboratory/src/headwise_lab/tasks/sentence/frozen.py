"""A finished run of sentence, frozen; of one that compares two texts, the part that reads each of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from headwise.heads.find import find_heads
from headwise.texts.batching import Encoded, Row
from headwise.texts.frozen import Agreement, Fidelity, Frozen
from headwise_lab.experiment.task import Task, name_run
from headwise_lab.frozen.runs import batch_rows, list_files, load_run, read_words
from headwise_lab.models.text_classifiers import WordVectors
from headwise_lab.tasks.sentence.data import UNKNOWN, encode
from headwise_lab.tasks.sentence.model import SelfAttentive
from headwise_lab.tasks.sentence.scales import SentenceScale
from headwise_lab.tasks.sentence.words import locate_words
from headwise_lab.training.trained import list_weights, read_scale


def open_sentence(task: Task, folder: Path, record: Mapping[str, Any]) -> Frozen:
    """Return the model of a run of sentence; of one that compares two texts, the part that reads each of them."""
    scale = read_scale(folder, record, SentenceScale)
    vocabulary, labels = read_words(folder, "labels")
    pairs = any(name.startswith("gate.") for name in list_weights(folder))

    def make() -> SelfAttentive:
        words = WordVectors(len(vocabulary), scale.width, dropout=scale.dropout)
        return SelfAttentive(words, len(labels), scale, texts=1 + pairs)

    model = load_run(folder, record, task, make)
    read = OneText(model) if pairs else model

    def row(sentence: str) -> Row:
        whole = next(locate_words([sentence]))
        found = whole[: scale.max_words]
        numbers = encode([word for word, _ in found], vocabulary)
        shown = tuple(
            word if one != UNKNOWN else vocabulary[UNKNOWN] for (word, _), one in zip(found, numbers, strict=True)
        )
        return Row(numbers, shown, [span for _, span in found], cut=len(whole) > len(found))

    def run(batch: Encoded) -> Tensor:
        found = read(batch.inputs["input_ids"])
        return found if isinstance(found, Tensor) else found["logits"]

    return Frozen(
        name_run(folder),
        read,
        find_heads(read),
        batch_rows(row, read),
        run,
        None,
        list_files(folder),
        score=Fidelity if pairs else Agreement,
        note="This run compares two texts; each line was read as one, and fidelity is of its heads side by side."
        if pairs
        else "",
        longest=f"{scale.max_words} words",
    )


class OneText(nn.Module):
    """Returns the concatenated heads of each text, [B, r * d], of ids [B, L], by a model that compares two texts."""

    def __init__(self, model: SelfAttentive) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the heads."""
        return self.model.attend(tokens)[0]
