"""The analyses of finished runs of the sentence task."""

from collections.abc import Mapping

from headwise_lab.experiment.task import Analysis

RELIABILITY = "reliability"
ENTROPY = "predictive-entropy"
ATTENTION_MAPS = "attention-maps"

UNCERTAINTY = "headwise_lab.tasks.sentence.uncertainty"
ANALYSES: Mapping[str, Analysis] = {
    RELIABILITY: Analysis(f"{UNCERTAINTY}:measure_reliability"),
    ENTROPY: Analysis(f"{UNCERTAINTY}:measure_entropy", about=f"{UNCERTAINTY}:identify_texts"),
    ATTENTION_MAPS: Analysis("headwise_lab.tasks.sentence.attention_maps:measure_attention"),
}
