"""Further measures of a classifier's answers: loss, calibration and, for two classes, ranking."""

import numpy as np
import torch
from numpy.typing import NDArray

from headwise.lab.experiment.metrics import Measure
from headwise.metrics.calibration import reliability_of

SHOWN = (
    Measure("NLL", "NLL", better="lower", digits=3),
    Measure("ECE", "ECE", better="lower", digits=3),
    Measure("OE", "OE", better="lower", digits=3),
    Measure("AUC-ROC", "AUC-ROC", digits=3),
    Measure("AUC-PR", "AUC-PR", digits=3),
    Measure("MCC", "MCC", digits=3),
    Measure("F1", "F1", digits=3),
)
# Lower bound of a probability in the loss.
LEAST = 1e-12


def scores(probabilities: NDArray[np.float64], labels: NDArray[np.int64]) -> dict[str, float]:
    """Return measures by name of class probabilities [N, C] for items with labels [N].

    "error" (share of wrong answers, %), "NLL" (mean negative log likelihood, nats), "ECE" and "OE" with 15 bins (An et
    al. 2020, appendix C.4), and for two classes, the last one positive, "AUC-ROC", "AUC-PR" (average precision), "MCC"
    and "F1".

    >>> found = scores(np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]), np.array([0, 1, 1]))
    >>> round(found["error"], 1), found["AUC-ROC"], round(found["F1"], 3)
    (33.3, 1.0, 0.667)
    """
    predicted = probabilities.argmax(axis=1)
    sure = reliability_of(torch.from_numpy(probabilities), torch.from_numpy(labels))
    likelihood = np.maximum(probabilities[np.arange(len(labels)), labels], LEAST)
    found = {
        "error": 100 * float((predicted != labels).mean()),
        "NLL": float(-np.log(likelihood).mean()),
        "ECE": sure.ece,
        "OE": sure.oe,
    }
    if probabilities.shape[1] == 2 and len(np.unique(labels)) == 2:
        # scikit-learn takes seconds to import
        from sklearn import metrics

        found["AUC-ROC"] = float(metrics.roc_auc_score(labels, probabilities[:, 1]))
        found["AUC-PR"] = float(metrics.average_precision_score(labels, probabilities[:, 1]))
        found["MCC"] = float(metrics.matthews_corrcoef(labels, predicted))
        found["F1"] = float(metrics.f1_score(labels, predicted))
    return found
