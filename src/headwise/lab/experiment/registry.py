"""The tasks by name; each is imported when it is first used."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from headwise.errors import require_choice

if TYPE_CHECKING:
    from headwise.lab.experiment.task import Task

# A new task is a folder in lab/tasks and a line here: its name on the command line, and "module:class".
TASKS: Mapping[str, str] = {
    "logic": "headwise.lab.tasks.logic.task:LogicTask",
    "translation": "headwise.lab.tasks.translation.task:TranslationTask",
    "classification": "headwise.lab.tasks.classification.task:ClassificationTask",
    "sentence": "headwise.lab.tasks.sentence.task:SentenceTask",
    "pretraining": "headwise.lab.tasks.pretraining.task:PretrainingTask",
    "glue": "headwise.lab.tasks.glue.task:GlueTask",
    "graph2text": "headwise.lab.tasks.graph2text.task:Graph2TextTask",
    "probing": "headwise.lab.tasks.probing.task:ProbingTask",
}


def named_task(name: str) -> Task:
    """Return the task of that name.

    Raises:
        SettingError: There is no such task.
    """
    require_choice("task", name, TASKS)
    module, _, kind = TASKS[name].partition(":")
    return getattr(import_module(module), kind)()
