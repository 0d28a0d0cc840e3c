"""`hw.Distill` and `hw.distill`: the loss by hand, in any loop, in the Trainer, by LoRA; and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import headwise as hw
from cases import cases
from headwise.errors import HeadwiseError, NotFired, SettingError, ShapeError
from headwise.shrinking.distill import logit_divergence, state_error

SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
TOKENS = torch.arange(3, 13).view(2, 5)
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
LABELS = torch.tensor([[-100, 4, 5, -100, 7], [-100, -100, 10, -100, -100]])
GIVEN = {"input_ids": TOKENS, "attention_mask": MASK}
# What each model is built from and called with, and the positions of its logits and states that count.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "LlamaForCausalLM": (SIZES, {**GIVEN, "labels": LABELS}),
    "GPT2LMHeadModel": ({"n_embd": 16, "n_layer": 2, "n_head": 4}, GIVEN),
    "BertForMaskedLM": (SIZES, {**GIVEN, "labels": LABELS}),
    "BertForSequenceClassification": ({**SIZES, "num_labels": 3}, {**GIVEN, "labels": torch.tensor([0, 2])}),
    "BertModel": (SIZES, GIVEN),
    "T5ForConditionalGeneration": (
        {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
        {**GIVEN, "labels": torch.tensor([[4, 5, 6, 7], [8, 9, -100, -100]])},
    ),
}


def build(name: str = "LlamaForCausalLM", **others: Any) -> Any:
    torch.manual_seed(3)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(vocab_size=30, **{**FAMILIES[name][0], **others})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def cut(model: Any) -> Any:
    """A copy of a model without some heads, and without dropout, which would not be computed twice alike."""
    smaller = copy.deepcopy(model)
    heads = hw.find_heads(smaller)
    hw.prune(heads, {site.name: [1, 2] for site in heads if site.kind == "self"})
    for module in smaller.modules():
        module.training = False
    # what counts as training is the mode of the whole model
    smaller.training = True
    return smaller


def list_states(model: Any, given: dict[str, Tensor]) -> tuple[Any, list[Tensor], list[Tensor]]:
    """Return what a model puts out, the states after the layers of its encoder or only stack, and of its decoder."""
    output = model(**given, output_hidden_states=True, return_dict=True)
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for states, modules in zip(found, list_layers(model), strict=True):
        calls = [layer.register_forward_hook(lambda _m, _a, out, s=states: s.append(first(out))) for layer in modules]
        model(**given)
        for call in calls:
            call.remove()
    return output, *found


def list_layers(model: Any) -> tuple[Any, Any]:
    if hasattr(model, "decoder"):
        return model.encoder.block, model.decoder.block
    inner = model.base_model
    return (inner.layers if hasattr(inner, "layers") else inner.h if hasattr(inner, "h") else inner.encoder.layer), ()


def first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def by_hand(name: str, model: Any, teacher: Any, temperature: float) -> tuple[Tensor | None, Tensor]:
    """The divergence of logits and the error of states, position by position."""
    given = FAMILIES[name][1]
    (mine, states, decoded), (wanted, targets, decoded_targets) = (list_states(one, given) for one in (model, teacher))
    seen = [(row, place) for row in range(2) for place in range(5) if MASK[row, place]]
    answered = seen
    labels = given.get("labels")
    if name == "T5ForConditionalGeneration" and labels is not None:
        answered = [(row, place) for row in range(2) for place in range(4) if labels[row, place] != -100]
    elif name == "LlamaForCausalLM":
        answered = [(row, place - 1) for row, place in seen if LABELS[row, place] != -100]
    elif name == "BertForMaskedLM":
        answered = [(row, place) for row, place in seen if LABELS[row, place] != -100]
    elif name == "BertForSequenceClassification":
        answered = [(0,), (1,)]

    def error(pairs: list[tuple[Tensor, Tensor]], places: Any) -> list[Tensor]:
        return [
            torch.stack([(own[p] - other[p]).square().sum() / other[p].square().sum() for p in places]).mean()
            for own, other in pairs
        ]

    errors = error([*zip(states, targets, strict=True)], seen)
    errors += error([*zip(decoded, decoded_targets, strict=True)], answered)
    if name == "BertModel":
        errors += error([(mine.last_hidden_state, wanted.last_hidden_state)], seen)
        return None, torch.stack(errors).mean()
    divergences = []
    for place in answered:
        p, q = ((one.logits[place] / temperature).softmax(-1) for one in (wanted, mine))
        divergences.append(temperature**2 * (p * (p.log() - q.log())).sum())
    return torch.stack(divergences).mean(), torch.stack(errors).mean()


@cases("name", FAMILIES)
def test_the_term_is_that_of_the_equation_and_so_is_its_gradient(name: str):
    teacher = build(name).double()
    model = cut(teacher)
    task = torch.tensor(0.7, dtype=torch.float64)
    method = hw.Distill(teacher, logits=0.3, hidden=2.0, text=0.5, temperature=1.7)
    with hw.attach(hw.find_heads(model), method) as run:
        model(**FAMILIES[name][1])
        loss = run.loss(task, share=0.5)
        stats = run.stats()
    divergence, error = by_hand(name, model, teacher, 1.7)
    expected = 0.5 * task + 0.5 * 2.0 * error
    if divergence is not None:
        expected = expected + 0.5 * 0.3 * divergence
        torch.testing.assert_close(stats["logits_divergence"], divergence)
    torch.testing.assert_close(stats["hidden_error"], error)
    torch.testing.assert_close(loss, expected)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found, wanted = (
        torch.autograd.grad(one, learned, materialize_grads=True, allow_unused=True) for one in (loss, expected)
    )
    # norms are computed in float32
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_teacher_is_neither_changed_nor_in_training():
    teacher = build("BertForMaskedLM").train()
    teacher.bert.encoder.eval()
    model = cut(teacher)
    before, modes = copy.deepcopy(teacher.state_dict()), [module.training for module in teacher.modules()]
    with hw.attach(hw.find_heads(model), hw.Distill(teacher)) as run:
        terms = []
        for _ in range(2):
            model(**GIVEN)
            run.loss(torch.zeros(())).backward()
            terms.append(run.stats())
    # dropout of the teacher would make them differ
    assert terms[0] == terms[1]
    assert [module.training for module in teacher.modules()] == modes
    assert all(parameter.grad is None and parameter.requires_grad for parameter in teacher.parameters())
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


def test_layers_are_selected_and_a_shallower_model_has_the_same_share_of_the_depth():
    teacher, model = build(num_hidden_layers=5), build(num_hidden_layers=2).train()

    def measure(**settings: Any) -> Tensor:
        with hw.attach(hw.find_heads(model), hw.Distill(teacher, logits=0.0, **settings)) as run:
            model(TOKENS)
            return run.loss(torch.zeros(()))

    _, states, _ = list_states(model, {"input_ids": TOKENS})
    _, wanted, _ = list_states(teacher, {"input_ids": TOKENS})
    # ceil(1 * 5 / 2) and ceil(2 * 5 / 2)
    errors = [state_error(states[0], wanted[2]), state_error(states[1], wanted[4])]
    torch.testing.assert_close(measure(), torch.stack(errors).mean())
    torch.testing.assert_close(measure(layers=(1,)), errors[1])


@cases("wrapped", ["checkpointed", "in a module", "twice"])
def test_forwards_inside_others_are_compared(wrapped: str):
    compare_wrapped(wrapped)


@pytest.mark.full
@cases("wrapped", ["peft", "compiled"])
def test_a_model_that_something_wraps_is_compared(wrapped: str):
    compare_wrapped(wrapped)


def compare_wrapped(wrapped: str) -> None:
    teacher = build()
    model = cut(teacher)
    whole: Any = model
    calls = 1
    if wrapped == "peft":
        peft = pytest.importorskip("peft")
        settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        whole = peft.get_peft_model(model, settings)
        whole.train()
    elif wrapped == "compiled":
        whole = torch.compile(model, backend="eager")
    elif wrapped == "checkpointed":
        model.train()
        # what it was called before transformers 5.24
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    elif wrapped == "in a module":
        whole = nn.ModuleDict({"student": model})
    else:
        calls = 2
    with hw.attach(hw.find_heads(whole), hw.Distill(teacher)) as run:
        for _ in range(calls):
            (whole["student"] if wrapped == "in a module" else whole)(input_ids=TOKENS, attention_mask=MASK)
        loss = run.loss(torch.zeros(()))
        loss.backward()
    with torch.no_grad():
        runner = whole["student"] if wrapped == "in a module" else whole
        states: list[Tensor] = []
        layers = [one for name, one in runner.named_modules() if name.endswith(("layers.0", "layers.1"))]
        hooks = [layer.register_forward_hook(lambda _m, _a, out: states.append(first(out))) for layer in layers]
        mine = runner(input_ids=TOKENS, attention_mask=MASK).logits
        for hook in hooks:
            hook.remove()
        wanted, targets, _ = list_states(teacher, GIVEN)
    keep = MASK.bool()
    errors = [state_error(*pair, keep=keep) for pair in zip(states, targets, strict=True)]
    expected = logit_divergence(mine, wanted.logits, keep=keep) + torch.stack(errors).mean()
    torch.testing.assert_close(loss.detach(), expected)


def test_evaluation_has_the_loss_of_the_task_and_a_loss_without_a_forward_is_refused():
    teacher = build()
    model = cut(teacher)
    run = hw.attach(hw.find_heads(model), hw.Distill(teacher))
    with pytest.raises(NotFired, match=r"call run\.loss\(loss\)"):
        run.check()
    with pytest.raises(NotFired, match="was not called in training since the last loss"):
        run.loss(torch.zeros(()))
    with torch.no_grad():
        model(TOKENS)
        assert float(run.loss(torch.tensor(2.0))) == 2.0
    model.eval()
    model(TOKENS)
    assert float(run.loss(torch.tensor(2.0))) == 2.0
    model.train()
    for _ in range(64):
        model(TOKENS)
    with pytest.raises(NotFired, match="their loss was never read"):
        model(TOKENS)
    run.remove()
    model(TOKENS)


@cases("lora", [None, 2])
def test_a_short_training_comes_nearer_to_the_teacher_and_leaves_a_stock_model(lora: int | None, tmp_path: Path):
    teacher = build()
    model = cut(teacher).eval()
    model.lm_head.weight.requires_grad_(False)
    names, before = list(model.state_dict()), copy.deepcopy(model.state_dict())
    batches = [GIVEN, TOKENS + 7, TOKENS + 14]
    recovery = hw.distill(model, teacher, batches, steps=30, lora=lora, learning_rate=1e-2, seed=1)
    assert recovery.steps == 30
    assert set(recovery.terms) == {"logits_divergence", "hidden_error"}
    for name, values in recovery.terms.items():
        assert len(values) == 30
        assert sum(values[-5:]) < 0.7 * sum(values[:5]), name
        assert name.replace("_", " ") in str(recovery)
    assert list(model.state_dict()) == names
    assert not any(module.training for module in model.modules())
    assert not model.lm_head.weight.requires_grad
    assert model.model.norm.weight.requires_grad
    assert torch.equal(model.lm_head.weight, before["lm_head.weight"])
    assert not torch.equal(
        model.model.layers[0].self_attn.q_proj.weight, before["model.layers.0.self_attn.q_proj.weight"]
    )
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(TOKENS).logits, model(TOKENS).logits)
    # nothing is left of what compared it
    model.train()
    for _ in range(70):
        model(TOKENS)


def test_the_text_alone_is_the_trainers_own_training():
    teacher = build()
    model, other = cut(teacher), cut(teacher)
    text = hw.Distill(teacher, logits=0.0, hidden=0.0, text=1.0)
    recovery = hw.distill(model, text, [GIVEN], steps=3, learning_rate=1e-3)
    assert list(recovery.terms) == ["text"]
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3, weight_decay=0.0)
    labels = TOKENS.masked_fill(MASK == 0, -100)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - step / 3)
        loss = other(**GIVEN, labels=labels).loss
        assert float(loss.detach()) == pytest.approx(recovery.terms["text"][step], rel=1e-4)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        optimizer.step()


def test_the_trainers_own_loop_takes_the_method(tmp_path: Path):
    teacher = build()
    model = cut(teacher)
    rows = [{"input_ids": row, "labels": row} for row in TOKENS]
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=1,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    hw.integrations.huggingface.attach(trainer, hw.Distill(teacher, text=0.5))
    expected = copy.deepcopy(model)
    with hw.attach(hw.find_heads(expected), hw.Distill(teacher, text=0.5)) as run:
        wanted = run.loss(expected(TOKENS, labels=TOKENS).loss)
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["loss"] == pytest.approx(float(wanted.detach()), rel=1e-3)
    assert {"logits_divergence", "hidden_error"} <= set(logged)


def llama(**sizes: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{"vocab_size": 30, **SIZES, **sizes}))


def spoil(model: Any) -> Any:
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    return model


@pytest.mark.filterwarnings("ignore:.*many workers")
def test_lightning_takes_the_method():
    pytest.importorskip("lightning")
    from lightning.pytorch import LightningModule, Trainer

    from headwise.integrations.lightning import HeadwiseCallback

    teacher = build()
    losses: list[float] = []

    class Student(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = cut(teacher).train()

        def training_step(self, batch: Tensor, _number: int) -> Tensor:
            return self.model(batch).logits.new_zeros(())

        def on_before_backward(self, loss: Tensor) -> None:
            losses.append(float(loss.detach()))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    student = Student()
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = Trainer(max_steps=1, accelerator="cpu", callbacks=[HeadwiseCallback(hw.Distill(teacher))], **quiet)
    trainer.fit(student, torch.utils.data.DataLoader(list(TOKENS), batch_size=2))
    model = student.model.train()
    with hw.attach(hw.find_heads(model), hw.Distill(teacher)) as run:
        model(TOKENS)
        assert losses == [pytest.approx(float(run.loss(torch.zeros(())).detach()), rel=1e-4)]


# Each a model that is cut, what it is to learn from, given that model whole, and the arguments.
REFUSED: dict[str, tuple[Any, Any, dict[str, Any], type[Exception], str]] = {
    "no model": (llama, lambda _: "teacher", {}, SettingError, "teacher is a str; expected a model"),
    "vocabulary": (
        llama,
        lambda _: llama(vocab_size=40),
        {},
        ShapeError,
        r"5, 30\) and the teacher.*5, 40\); expected",
    ),
    "fewer tokens": (llama, lambda _: llama(vocab_size=5), {}, HeadwiseError, r"cannot be run on what .*\(IndexError"),
    "width": (llama, lambda _: llama(hidden_size=8), {}, ShapeError, r"5, 16\) and the teacher.* 8\).*hidden=0"),
    "layers": (llama, lambda _: build("GPT2LMHeadModel"), {}, SettingError, r"no layers at 'model\.layers'.*hidden=0"),
    "nothing": (llama, lambda own: hw.Distill(own, logits=0.0, hidden=0.0), {}, SettingError, "are all 0"),
    "no batch": (llama, lambda own: own, {"batches": []}, SettingError, "no batch"),
    "no step": (llama, lambda own: own, {"steps": 0}, SettingError, "steps is 0"),
    "option": (llama, lambda own: own, {"stepz": 1}, SettingError, "TrainingArguments of transformers refuses.*stepz"),
    "rank": (llama, lambda own: own, {"lora": 0}, SettingError, "lora is 0"),
    "diverged": (lambda: spoil(llama()), lambda _: llama(), {}, HeadwiseError, "loss of step 1 is not finite"),
    "no logits": (
        lambda: build("BertModel"),
        lambda own: hw.Distill(own, hidden=0.0),
        {},
        SettingError,
        "BertModel has no logits, and nothing else",
    ),
    "no labels": (
        lambda: build("BertForMaskedLM"),
        lambda own: hw.Distill(own, text=1.0),
        {},
        SettingError,
        "BertForMaskedLM computes a loss",
    ),
}


@cases("name", REFUSED)
def test_what_cannot_be_learned_from_is_refused_in_a_sentence(name: str):
    make, teach, changes, kind, message = REFUSED[name]
    whole = make()
    options: dict[str, Any] = {"batches": [TOKENS], "steps": 1, **changes}
    model = cut(whole)
    with pytest.raises(kind, match=message):
        hw.distill(model, teach(whole), **options)


def test_a_model_is_not_its_own_teacher():
    model = llama()
    with pytest.raises(SettingError, match=r"shares parameters with the model.*copy\.deepcopy"):
        hw.distill(model, model, [TOKENS], steps=1)


def test_a_divergence_by_hand_and_the_size_of_its_gradient():
    own, other = torch.tensor([[1.0, 0.0, -1.0]], dtype=torch.float64), torch.tensor([[0.5, 2.0, 0.0]]).double()
    p, q = (other / 3.0).softmax(-1), (own / 3.0).softmax(-1)
    assert float(logit_divergence(own, other, temperature=3.0)) == pytest.approx(float(9 * (p * (p / q).log()).sum()))
    # in the limit of high temperatures the gradient is that of half the squared difference of centered logits, over V
    own.requires_grad_()
    (slope,) = torch.autograd.grad(logit_divergence(own, other, temperature=1e4), own)
    centered = (own - own.mean()) - (other - other.mean())
    torch.testing.assert_close(slope, centered / 3, rtol=1e-3, atol=1e-4)
    # half precision is computed in float32, and no token that the teacher excludes gives NaN
    assert logit_divergence(own.half(), other.half()).dtype == torch.float32
    assert logit_divergence(own, torch.tensor([[0.0, -torch.inf, 1.0]]).double()).isfinite()
    assert state_error(F.pad(own, (0, 1)), torch.zeros(1, 4).double()).isfinite()
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert float(logit_divergence(torch.ones(2, 3, 4), torch.zeros(2, 3, 4), keep=nothing)) == 0.0
