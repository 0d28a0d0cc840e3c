"""Pictures name the data that was compared."""

import dataclasses

import pytest

from headwise.plots.style import drawing
from headwise_lab.results.evidence import Evidence
from headwise_lab.results.figures import name_data
from headwise_lab.results.tabulate import make_table
from lab.papers.test_paper_figures import evidence as evidence


@pytest.mark.parametrize(("named", "said"), [("trec", " on trec, scale "), ("", ", scale ")])
def test_a_picture_says_task_data_scale_and_seeds(evidence: Evidence, named: str, said: str):
    table = make_table(dataclasses.replace(evidence.results, named=named))
    with drawing(4.0, 3.0) as figure:
        axes = figure.subplots()
        name_data(axes, table)
        assert axes.get_title(loc="left").startswith(f"{table.task}{said}{table.scale}, ")
