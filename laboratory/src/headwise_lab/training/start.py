"""The models that fine-tuning starts from: a folder of Hugging Face, a pre-training run, or each arm's own run."""

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification
from typing_extensions import override

from headwise.errors import DataError, HeadwiseError, SettingError
from headwise.routing.save import load
from headwise.stock_folders import CONFIG, RECORD, open_within
from headwise.texts.pretrained import MODEL, quietly, require_whole
from headwise_lab.data.arrays import digest
from headwise_lab.experiment.arm import Arm, PairHeads, Widen, escape_arm_name
from headwise_lab.experiment.run_folder import RESULT, is_finished, read_json, require_intact, require_intact_export
from headwise_lab.models.electra import DEVIATION, decayed_apart, draw_normal

FORMS = (
    "a folder of Hugging Face, a finished run of pretraining, or the --out folder of a comparison of pretraining or of "
    "glue, where each arm begins with its own run"
)
# Folders of finished runs that a model begins with: of pre-training, and of fine-tuning.
DISCRIMINATOR = "discriminator"
COMPARISON = "comparison.json"
LAYER = re.compile(r"\.(?:layer|layers|h|block|blocks)\.(\d+)\.")


@dataclass(frozen=True)
class Start:
    """Where models come from.

    Attributes:
        place: What was named.
        task: Task of the comparison that `place` is, each of whose arms has a run; "" for one model.
        fingerprint: Digest of what determines the models.
    """

    place: Path
    task: str
    fingerprint: str

    @property
    def of_arms(self) -> bool:
        """Whether each arm starts from its own pre-trained run; the method then acts in pre-training only."""
        return bool(self.task)

    def folder(self, arm: str, seed: int, starts: int) -> Path:
        """Return the folder of the model that a run begins with."""
        if not self.task:
            only = find_model_folder(self.place)
            if only is None:
                raise DataError(f"{self.place} holds no model any more; expected {FORMS}.")
            require_intact_export(only)
            return only
        # a second fine-tuning starts from the first with the same seed
        number = seed if self.task == "glue" else seed % starts
        run = self.place / escape_arm_name(arm) / f"seed-{number}"
        found = run / (MODEL if self.task == "glue" else DISCRIMINATOR)
        if not (found / CONFIG).is_file():
            if is_finished(run) and self.task == "pretraining":
                raise DataError(
                    f"{run} has no folder {DISCRIMINATOR!r}: one with gates, talking heads or differential attention "
                    "is not written, as transformers would load it without them; leave such an arm out, and copy the "
                    "folder of any other again."
                )
            remedy = " with --set keep_model=true" if self.task == "glue" else ""
            raise DataError(
                f"{run} holds no finished run with a model to begin with; run {self.task} with arm {arm} and seed "
                f"{number}{remedy} first."
            )
        require_intact_export(found)
        return found

    def pretraining(self, arm: str, seed: int, starts: int) -> int | None:
        """Return the seed of the pre-training that a run goes back to; None where all runs begin with one model."""
        if not self.task:
            return None
        run = self.folder(arm, seed, starts).parent
        if self.task == "pretraining":
            return seed % starts
        require_intact(run, RESULT)
        before = read_json(run / RESULT)
        if not isinstance(before, dict) or "start" not in before:
            raise DataError(f"{run} does not record which pre-training it began with; delete it and run it again.")
        return None if before["start"] is None else int(before["start"])

    def any_folder(self) -> Path:
        """Return the folder of one of the models, for what all of them share."""
        if not self.task:
            return self.folder("", 0, 1)
        name = MODEL if self.task == "glue" else DISCRIMINATOR
        found = next((path.parent for path in sorted(self.place.glob(f"*/seed-*/{name}/{CONFIG}"))), None)
        if found is None:
            raise DataError(f"{self.place} holds no finished run with a model to begin with; finish it first.")
        require_intact_export(found)
        return found


def find_start(place: Path | None, expected: str = FORMS) -> Start:
    """Return where the models of a place come from."""
    if place is None:
        raise DataError(f"glue needs --pretrained: {expected}.")
    if (place / COMPARISON).is_file():
        record = read_json(place / COMPARISON)
        task = record.get("task") if isinstance(record, dict) else None
        if task not in ("pretraining", "glue"):
            raise DataError(f"{place} is a comparison of {task or 'no task'}; expected {expected}.")
        # the runs follow from these to the bit, and more arms may come
        known = {name: record.get(name) for name in ("scale", "sizes", "data")}
        return Start(place, task, digest(f"{task} {known}"))
    found = find_model_folder(place)
    if found is None:
        raise DataError(f"{place} holds no model; expected {expected}.")
    files = sorted(path for path in found.iterdir() if path.suffix in (".json", ".safetensors", ".bin", ".pt", ".txt"))
    return Start(place, "", digest(" ".join(path.name for path in files), files))


def require_kept(arm: Arm, place: Path | None, remedy: str = "leave it out") -> None:
    """Refuse an arm that would undo what the model of a folder learned: paired heads, or wider layers."""
    for kind, undone in (
        (PairHeads, "pairs heads, after which attention computes nothing that the model of {} learned"),
        (Widen, "has wider feed-forward layers, which are drawn anew and forget what the model of {} learned"),
    ):
        if arm.find(kind) is not None:
            raise SettingError(f"arm {arm.name} {undone.format(place)}; {remedy}.")


class Classifier(nn.Module):
    """A pretrained model with a new head for classes, or for one number.

    Attributes:
        network: The model of transformers.
        layer_decay: What the rate of each layer is over that of the layer above it.

    Args:
        folder: Folder of the model.
        classes: Number of classes; 1 for a number.
        layer_decay: See the attribute.
        trust_remote_code: Whether code that the folder names may run.

    Raises:
        DataError: The folder holds no model that transformers, or `headwise.load`, can load.
    """

    def __init__(
        self, folder: Path, classes: int, layer_decay: float = 1.0, *, trust_remote_code: bool = False
    ) -> None:
        super().__init__()
        self.network, fresh = _open_classifier(folder, classes, trust_remote_code=trust_remote_code)
        self.classes, self.layer_decay = classes, layer_decay
        deviation = getattr(self.network.config, "initializer_range", DEVIATION)
        backbone = f"network.{self.network.base_model_prefix}."
        for name, module in self.named_modules():
            if next(module.parameters(recurse=False), None) is None:
                continue
            if name.startswith(backbone) and name.removeprefix("network.") not in fresh:
                # a run draws its parameters module by module: these begin as they were found
                object.__setattr__(module, "reset_parameters", _stay)
            elif isinstance(module, nn.Linear | nn.Embedding):
                module.reset_parameters = functools.partial(draw_normal, module, deviation)

    @override
    def forward(self, labels: Tensor | None = None, **inputs: Tensor) -> dict[str, Tensor]:
        """Return "logits", [B, classes] or [B] for a number, and the mean "loss" where there are labels."""
        logits = self.network(**inputs).logits.float()
        found = {"logits": logits.squeeze(-1) if self.classes == 1 else logits}
        if labels is not None:
            found["loss"] = losses(found["logits"], labels).mean()
        return found

    def parameter_groups(self, rate: float, weight_decay: float) -> list[dict[str, Any]]:
        """Return the optimizer's groups: lower layers are trained more slowly, biases and norms are not decayed.

        With L layers, the rate is decay^(L + 1 - l) of that of the head in layer l = 0 .. L - 1, and decay^(L + 2) in
        the embeddings (Clark et al. 2020, released code).
        """
        named = [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]
        top = 1 + max((int(found[1]) for name, _ in named if (found := LAYER.search(name))), default=-1)
        backbone = f"network.{self.network.base_model_prefix}."
        depths: dict[int, list[tuple[str, Tensor]]] = {}
        for name, parameter in named:
            layer = LAYER.search(name)
            below = top + 1 - int(layer[1]) if layer else top + 2 if name.startswith(backbone) else 0
            depths.setdefault(below, []).append((name, parameter))
        return [
            {**group, "lr": rate * self.layer_decay**below}
            for below, members in depths.items()
            for group in decayed_apart(members, weight_decay)
        ]


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each example: cross entropy, or of scores from 0 to 5 the squared error over 25."""
    if logits.dim() == 1:
        return (logits - labels.to(logits.dtype) / 5.0) ** 2
    return nn.functional.cross_entropy(logits, labels.long(), reduction="none")


def require_positions(folder: Path, length: int, *, trust_remote_code: bool = False) -> None:
    """Refuse texts of more tokens than a model has positions for."""
    try:
        with open_within(folder, trusted=trust_remote_code):
            config: Any = AutoConfig.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=trust_remote_code
            )
    except HeadwiseError:
        raise
    except Exception as error:
        # whatever transformers raises for a file that is missing or not as it expects
        raise DataError(f"{folder} cannot be loaded by transformers: {' '.join(str(error).split())[:200]}") from None
    # XLNet has -1 for any number
    known = max(0, int(getattr(config, "max_position_embeddings", None) or 0)) or None
    # RoBERTa and its like count positions from behind that of padding
    shifted = int(config.pad_token_id or 0) + 1 if "roberta" in config.model_type else 0
    if known is not None and length > known - shifted:
        raise DataError(
            f"{folder} has positions for {known - shifted} tokens, and texts are cut at {length}; give --set "
            f"length={known - shifted}."
        )


def find_model_folder(place: Path) -> Path | None:
    """Return the folder of Hugging Face that a finished run keeps, or that was named; None where there is neither."""
    return next((one for one in (place / DISCRIMINATOR, place / MODEL, place) if (one / CONFIG).is_file()), None)


def _open_classifier(folder: Path, classes: int, *, trust_remote_code: bool) -> tuple[Any, set[str]]:
    """Return a classifier and the modules of its backbone that the folder has no parameters for."""
    try:
        with quietly(), open_within(folder, trusted=trust_remote_code):
            if (folder / RECORD).is_file():
                return _load_with_aggregators(folder, classes, trust_remote_code=trust_remote_code), set()
            network, said = AutoModelForSequenceClassification.from_pretrained(
                str(folder),
                trust_remote_code=trust_remote_code,
                num_labels=classes,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                local_files_only=True,
                dtype=torch.get_default_dtype(),
            )
    except HeadwiseError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{folder} holds no model that transformers can load as a classifier ({reason}).") from error
    require_whole(folder, network, said, backbone=f"{network.base_model_prefix}.")
    return network, {name.rpartition(".")[0] for name in said["missing_keys"]}


def _load_with_aggregators(folder: Path, classes: int, *, trust_remote_code: bool) -> Any:
    whole: Any = load(folder, trust_remote_code=trust_remote_code)
    config = AutoConfig.for_model(**{**whole.config.to_dict(), "num_labels": classes})
    with torch.random.fork_rng(devices=[]):
        network: Any = AutoModelForSequenceClassification.from_config(config, trust_remote_code=trust_remote_code)
    setattr(network, network.base_model_prefix, whole.base_model)
    return network


def _stay() -> None:
    """Leave a pretrained module unchanged."""
