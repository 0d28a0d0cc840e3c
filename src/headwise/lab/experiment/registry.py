"""The tasks there are, each imported when it is asked for.

Owns their names. Must not know what a task does.
"""

from __future__ import annotations

from headwise.errors import require_choice
from headwise.lab.experiment.task import Task

TASKS = (
    "logic",
    "translation",
    "classification",
    "sentence",
    "pretraining",
    "glue",
    "graph2text",
    "probing",
)


def named_task(name: str) -> Task:
    """Return the task of that name.

    Raises:
        SettingError: There is no such task.
    """
    require_choice("task", name, TASKS)
    if name == "logic":
        from headwise.lab.tasks.logic.task import LogicTask

        return LogicTask()
    if name == "classification":
        from headwise.lab.tasks.classification.task import ClassificationTask

        return ClassificationTask()
    if name == "sentence":
        from headwise.lab.tasks.sentence.task import SentenceTask

        return SentenceTask()
    if name == "pretraining":
        from headwise.lab.tasks.pretraining.task import PretrainingTask

        return PretrainingTask()
    if name == "glue":
        from headwise.lab.tasks.glue.task import GlueTask

        return GlueTask()
    if name == "probing":
        from headwise.lab.tasks.probing.task import ProbingTask

        return ProbingTask()
    if name == "graph2text":
        from headwise.lab.tasks.graph2text.task import Graph2TextTask

        return Graph2TextTask()
    from headwise.lab.tasks.translation.task import TranslationTask

    return TranslationTask()
