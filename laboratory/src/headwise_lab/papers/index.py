"""Every table and figure of the papers that can be run, and our own, by its id."""

from headwise_lab.papers.diversify.tables import DIVERSIFY
from headwise_lab.papers.diversity.doses import DOSES
from headwise_lab.papers.diversity.ours import OURS
from headwise_lab.papers.diversity.shrinking import SHRUNK
from headwise_lab.papers.guided.tables import GUIDED
from headwise_lab.papers.reproduction import Reproduction
from headwise_lab.papers.repulsive.glue import REPULSIVE_GLUE
from headwise_lab.papers.repulsive.graphs import GRAPHS
from headwise_lab.papers.repulsive.sentences import SENTENCES
from headwise_lab.papers.repulsive.texts import SENTENCE_FIGURES
from headwise_lab.papers.repulsive.translation import REPULSIVE

REPRODUCTIONS: dict[str, Reproduction] = {
    reproduction.id: reproduction
    for reproduction in (
        *REPULSIVE,
        *SENTENCES,
        *SENTENCE_FIGURES,
        *REPULSIVE_GLUE,
        *GRAPHS,
        *DIVERSIFY,
        *GUIDED,
        *OURS,
        *DOSES,
        *SHRUNK,
    )
}
