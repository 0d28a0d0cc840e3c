"""The model that is made smaller: opened from its folder, with a text to choose by, to train on and to score with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.cli.extensions import find_stock_folder
from headwise.cli.settings import Shrink
from headwise.errors import DataError, HeadwiseError
from headwise.heads.find import find_heads
from headwise.heads.heads import Heads
from headwise.routing.save import load
from headwise.shrinking.distill import Distill, distill, is_causal
from headwise.stock_folders import RECORD, open_within
from headwise.texts.batching import Encoded
from headwise.texts.frozen import Fidelity
from headwise.texts.labeled_texts import describe_blank
from headwise.texts.pretrained import open_tokenizer, quietly, require_whole
from headwise.texts.tables import Columns
from headwise.texts.transformer import open_folder

# What --recover-from takes, and the weights that it stands for: of logits, of hidden states, and of the text.
SOURCES: Mapping[str, tuple[float, float, float]] = {
    "mixed": (1.0, 1.0, 0.0),
    "logits": (1.0, 0.0, 0.0),
    "hidden": (0.0, 1.0, 0.0),
    "text": (0.0, 0.0, 1.0),
}
# Of every so many lines one is held out, for the scores.
HELD_OUT = 5
ROUNDS = 9
PROMPT, GENERATED = 32, 16


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, and a text to choose heads by, to train on, and to score with.

    A causal model predicts the next token, so that its loss is known; of another model counts how little the `states`
    that it put out on the held-out batches, by number, move. `blank` says how many texts were blank.
    """

    name: str
    model: nn.Module = field(repr=False)
    tokenizer: Any
    causal: bool
    chosen: tuple[Encoded, ...]
    trained: tuple[Encoded, ...]
    held_out: tuple[Encoded, ...]
    states: dict[int, Tensor]
    blank: str = ""

    @property
    def heads(self) -> Heads:
        """Its heads as they are now."""
        return find_heads(self.model)

    @property
    def score_name(self) -> str:
        """What the score is called."""
        return "log-likelihood per token, nats" if self.causal else "fidelity (cosine of the states to those before)"

    def run(self, model: nn.Module, batch: Encoded) -> Tensor:
        """Return the logits of a causal model, or the last states of another, below its head."""
        whole: Any = model
        if self.causal:
            return whole(**batch.inputs, use_cache=False).logits
        return whole.base_model(**batch.inputs).last_hidden_state

    def score_items(self, output: Tensor, batch: Encoded) -> Tensor:
        """Return the score of each line of a held-out batch, [B]."""
        if self.causal:
            return -self.count_loss(output, batch)
        cosines = F.cosine_similarity(output.double(), self.states[batch.number].double(), dim=-1)
        return (cosines * batch.keep).sum(1) / batch.keep.sum(1)

    def count_loss(self, logits: Tensor, batch: Encoded) -> Tensor:
        """Return the mean loss of the tokens of each line, [B]."""
        keep = batch.keep[:, 1:]
        losses = F.cross_entropy(logits[:, :-1].mT, batch.inputs["input_ids"][:, 1:], reduction="none")
        return (losses * keep).sum(1) / keep.sum(1).clamp_min(1)

    def score_measured(self) -> Callable[[Tensor, Encoded], Tensor]:
        """Return the score of `hw.measure` on the batches to choose by."""
        return self.score_items if self.causal else Fidelity()

    @torch.no_grad()
    def score(self) -> float:
        """Return the score of the model as it is now, the larger the better."""
        items = [self.score_items(self.run(self.model, batch), batch) for batch in self.held_out]
        return float(torch.cat(items).mean())

    def estimate(self) -> Iterator[Tensor]:
        """Yield what first-order importance differentiates, batch by batch.

        Of a causal model the losses. Of another no loss is known: states along fixed random directions, whose mean
        absolute derivative says how much states move.
        """
        generator = torch.Generator().manual_seed(0)
        for batch in self.chosen:
            output = self.run(self.model, batch)
            if self.causal:
                yield self.count_loss(output, batch)
                continue
            directions = torch.randn(output.shape, generator=generator).to(output)
            yield ((output * directions).sum(-1) * batch.keep).sum(1) / batch.keep.sum(1)

    def recover(self, whole: nn.Module, given: Shrink, advance: Callable[[], None]) -> None:
        """Train the model as it is now towards the whole model, or on the text."""
        from transformers import TrainerCallback

        class Bar(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                advance()

        logits, hidden, text = SOURCES[given.recover_from]
        method = Distill(whole, logits=logits, hidden=hidden, text=text)
        batches = [batch.inputs for batch in self.trained]
        distill(self.model, method, batches, steps=given.recover, learning_rate=given.rate, seed=0, callbacks=[Bar()])

    @torch.no_grad()
    def time(self, models: dict[str, nn.Module]) -> dict[str, dict[str, float]]:
        """Return the milliseconds of models: of a batch, and of causal ones of a token that is generated with a cache.

        Models take turns, and the median of rounds counts. Of a causal model with too few positions no token is
        generated.
        """
        batch = max(self.chosen, key=lambda one: one.keep.numel())
        runs: dict[str, Callable[[nn.Module], object]] = {"forward of a batch": lambda model: self.run(model, batch)}
        positions = getattr(self.model.config, "max_position_embeddings", None) or PROMPT + GENERATED
        length = min(PROMPT, positions - GENERATED)
        if self.causal and length > 0:
            # padding on the right would come between a prompt and its next token
            prompts = batch.inputs["input_ids"][batch.keep[:, :length].all(1), :length]
            runs["generated token"] = lambda model: _generate(model, prompts)
        found: dict[str, dict[str, float]] = {name: {} for name in models}
        for what, call in runs.items():
            seconds: dict[str, list[float]] = {name: [] for name in models}
            for turn in range(ROUNDS + 1):
                for name, model in models.items():
                    _synchronize()
                    started = time.perf_counter()
                    call(model)
                    _synchronize()
                    if turn:
                        seconds[name].append(time.perf_counter() - started)
            share = 1 if what == "forward of a batch" else GENERATED
            for name, each in seconds.items():
                found[name][what] = 1e3 * statistics.median(each) / share
        return found


def _generate(model: Any, ids: Tensor) -> None:
    """Have a model generate tokens one by one with a cache."""
    from transformers import GenerationConfig

    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    # that of the folder may ask for any number of beams, or for a cache of any size
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        model.generate(ids, max_new_tokens=GENERATED, min_new_tokens=GENERATED, **options)
    finally:
        model.generation_config = own


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def open_subject(given: Shrink) -> Subject:
    """Return the model of a folder of Hugging Face, or of a run that keeps one, with a text.

    Heads are chosen by so many lines, and a fifth as many are held out; the model is trained on all that are not.

    Raises:
        DataError: The folder holds no such model, or the text has too few lines.
    """
    folder, trusted, lines = find_stock_folder(given.model), given.trust_remote_code, given.lines
    frozen = open_folder(folder, trust_remote_code=trusted)
    tokenizer = open_tokenizer(folder, trust_remote_code=trusted)
    model: Any = open_whole(folder, frozen.model, trust_remote_code=trusted)
    if getattr(model.config, "is_encoder_decoder", False):
        raise DataError(
            f"{folder} holds an encoder-decoder, of which this command reads the encoder alone; in a script, hw.prune "
            "and hw.merge take the whole model."
        )
    causal = is_causal(type(model).__name__)
    if given.recover and not {"text": causal, "logits": model.base_model is not model}.get(given.recover_from, True):
        raise DataError(
            f"{folder} holds a {type(model).__name__}, which has no {given.recover_from.replace('text', 'loss')} on a "
            "text to be trained by; give --recover-from mixed."
        )
    model = model.to(next(frozen.model.parameters()).device).eval()
    read = frozen.read_text(given.text, Columns(given.text_column))
    sentences = list(read)
    held_out = sentences[::HELD_OUT][: max(1, lines // (HELD_OUT - 1))]
    others = [line for place, line in enumerate(sentences) if place % HELD_OUT]
    if not others:
        raise DataError(f"{given.text} has {len(sentences)} lines; expected at least 2, of which one is held out.")
    subject = Subject(
        frozen.name,
        model,
        tokenizer,
        causal,
        tuple(_trim(frozen.read(others[:lines]), causal=causal)),
        tuple(_trim(frozen.read(others), causal=causal)),
        tuple(_trim(frozen.read(held_out), causal=causal)),
        {},
        describe_blank(read),
    )
    if not subject.chosen or not subject.held_out:
        raise DataError(f"the lines of {given.text} have one token each; expected text.")
    if not causal:
        with torch.no_grad():
            subject = replace(subject, states={batch.number: subject.run(model, batch) for batch in subject.held_out})
    return subject


def _trim(batches: Any, *, causal: bool) -> Iterator[Encoded]:
    """Yield batches that a model takes, without lines of one token where the next is predicted."""
    for batch in batches:
        if not causal:
            yield batch
            continue
        rows = batch.keep.sum(1) > 1
        inputs = {name: tensor[rows] for name, tensor in batch.inputs.items() if name != "token_type_ids"}
        left = rows.nonzero().flatten().tolist()
        places, tokens = (tuple(held[row] for row in left) for held in (batch.places, batch.tokens))
        if left:
            yield replace(batch, places=places, inputs=inputs, keep=batch.keep[rows], tokens=tokens, encoding=None)


def open_whole(folder: Path, base: nn.Module, *, trust_remote_code: bool) -> nn.Module:
    """Return the model of a folder with the head that it was saved with, given the model without it.

    Raises:
        DataError: Its class is unknown to transformers, or the folder lacks a part of it.
    """
    import transformers

    if (folder / RECORD).is_file():
        return load(folder, trust_remote_code=trust_remote_code)
    config: Any = base.config
    name = next(iter(getattr(config, "architectures", None) or ()), type(base).__name__)
    if name == type(base).__name__:
        return base
    kind: Any = transformers.AutoModelForCausalLM if is_causal(name) else getattr(transformers, name, None)
    if kind is None:
        raise DataError(
            f"{folder} holds a model of the class {name}, which transformers does not have; in a script, hw.prune and "
            "hw.merge take any model."
        )
    try:
        with quietly(), open_within(folder, trusted=trust_remote_code):
            model, information = kind.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=trust_remote_code, output_loading_info=True
            )
    except HeadwiseError:
        raise
    except Exception as error:
        # whatever transformers raises for a file that is missing or not as it expects
        raise DataError(f"{folder} cannot be loaded by transformers: {' '.join(str(error).split())[:300]}") from None
    require_whole(folder, model, information)
    return model
