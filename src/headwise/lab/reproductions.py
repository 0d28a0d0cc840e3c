"""Every table and figure of the papers that can be run, by its id.

Owns the list; what each is stands in `tables`.
"""

from __future__ import annotations

from headwise.lab.analyses import ANALYSES
from headwise.lab.tables.diversify import DIVERSIFY
from headwise.lab.tables.guided import GUIDED
from headwise.lab.tables.reproduction import Reproduction
from headwise.lab.tables.repulsive import REPULSIVE
from headwise.lab.tables.repulsive_figures import SENTENCE_FIGURES
from headwise.lab.tables.repulsive_glue import REPULSIVE_GLUE
from headwise.lab.tables.repulsive_graphs import GRAPHS
from headwise.lab.tables.repulsive_sentences import SENTENCES
from headwise.lab.tasks.named import TASKS

__all__ = ["REPRODUCTIONS"]

# What needs a task or an analysis that is not there yet is not listed.
REPRODUCTIONS: dict[str, Reproduction] = {
    reproduction.id: reproduction
    for reproduction in (*REPULSIVE, *SENTENCES, *SENTENCE_FIGURES, *REPULSIVE_GLUE, *GRAPHS, *DIVERSIFY, *GUIDED)
    if reproduction.task in TASKS and reproduction.analysis in ("", *ANALYSES)
}
