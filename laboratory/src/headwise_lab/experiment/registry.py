"""The tasks by name; each is imported when it is first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from headwise.errors import require_choice

if TYPE_CHECKING:
    from headwise_lab.experiment.task import Task

# A new task is a folder in headwise_lab/tasks and a line here: its name on the command line, and "module:class".
TASKS: Mapping[str, str] = {
    "logic": "headwise_lab.tasks.logic.task:LogicTask",
    "translation": "headwise_lab.tasks.translation.task:TranslationTask",
    "classification": "headwise_lab.tasks.classification.task:ClassificationTask",
    "sentence": "headwise_lab.tasks.sentence.task:SentenceTask",
    "pretraining": "headwise_lab.tasks.pretraining.task:PretrainingTask",
    "lm": "headwise_lab.tasks.lm.task:LmTask",
    "facts": "headwise_lab.tasks.sentence.facts:FactsTask",
    "glue": "headwise_lab.tasks.glue.task:GlueTask",
    "graph2text": "headwise_lab.tasks.graph2text.task:Graph2TextTask",
    "probing": "headwise_lab.tasks.classification.probing:ProbingTask",
}


def named_task(name: str) -> Task:
    """Return the task of that name."""
    require_choice("task", name, TASKS)
    return resolve_name(TASKS[name])()


def find_commands() -> list[Callable[..., Any]]:
    """Return the commands that tasks add to the command line: `COMMANDS` of a task's `commands.py`.

    The tasks themselves are not imported.
    """
    packages = dict.fromkeys(place.partition(":")[0].rpartition(".")[0] for place in TASKS.values())
    modules = [f"{package}.commands" for package in packages]
    return [command for module in modules if find_spec(module) for command in import_module(module).COMMANDS]
