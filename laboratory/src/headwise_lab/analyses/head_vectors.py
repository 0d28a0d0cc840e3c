"""The mean output of each head, and how similar these vectors are (Li et al. 2021, Figure 3)."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.errors import SettingError
from headwise.heads.taps import Taps
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.training.trained import load_trained

KIND = "self"


def measure_head_vectors(settings: RunSettings, folder: Path) -> dict[str, Any]:
    """Return the vector of each encoder head of a finished run, and the mean cosine between them."""
    trained = load_trained(settings, folder)
    device = next(trained.model.parameters()).device
    heads = trained.heads.kind(KIND)
    with torch.no_grad(), Taps(heads, outputs=True) as taps:
        sums: dict[str, Tensor] = {}
        tokens: dict[str, int] = {}
        for _ in trained.task.probe(trained.model, trained.data):
            for capture in taps.read():
                outputs, keep, name = capture.outputs, capture.query_keep, capture.site.name
                assert outputs is not None
                mask = torch.ones(outputs.shape[:2], device=device) if keep is None else keep
                total = torch.einsum("bqhe,bq->he", outputs.double(), mask.double())
                sums[name] = sums.get(name, torch.zeros_like(total)) + total
                tokens[name] = tokens.get(name, 0) + int(mask.sum())
    vectors = torch.stack([sums[name] / tokens[name] for name in sums]).mean(dim=0)
    return {"numbers": {"head_vector_cosine": vector_cosine(vectors)}, "vectors": vectors.tolist()}


def head_vectors(analysis: dict[str, Any]) -> Tensor:
    """Return the vectors [H, e] of a record of `measure_head_vectors`."""
    return torch.tensor(analysis["vectors"], dtype=torch.float64)


def vector_cosine(vectors: Tensor) -> float:
    """Return the mean cosine between two different rows of vectors [H, e].

    >>> vector_cosine(torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]]))
    0.3333333333333333
    """
    if len(vectors) < 2:
        raise SettingError(f"vectors are {len(vectors)}; expected at least two heads to compare.")
    units = torch.nn.functional.normalize(vectors.double(), dim=1)
    cosines = units @ units.T
    pairs = len(vectors) * (len(vectors) - 1)
    return float((cosines.sum() - cosines.diagonal().sum()) / pairs)
