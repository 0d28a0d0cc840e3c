"""Every table and figure of the papers that can be run, by its id.

Owns the list; what each is stands in `tables`.
"""

from __future__ import annotations

from headwise.lab.analyses.registry import ANALYSES
from headwise.lab.experiment.registry import TASKS
from headwise.lab.papers.diversify.tables import DIVERSIFY
from headwise.lab.papers.guided.tables import GUIDED
from headwise.lab.papers.reproduction import Reproduction
from headwise.lab.papers.repulsive.glue import REPULSIVE_GLUE
from headwise.lab.papers.repulsive.graphs import GRAPHS
from headwise.lab.papers.repulsive.sentences import SENTENCES
from headwise.lab.papers.repulsive.texts import SENTENCE_FIGURES
from headwise.lab.papers.repulsive.translation import REPULSIVE

# What needs a task or an analysis that is not there yet is not listed.
REPRODUCTIONS: dict[str, Reproduction] = {
    reproduction.id: reproduction
    for reproduction in (*REPULSIVE, *SENTENCES, *SENTENCE_FIGURES, *REPULSIVE_GLUE, *GRAPHS, *DIVERSIFY, *GUIDED)
    if reproduction.task in TASKS and reproduction.analysis in ("", *ANALYSES)
}
