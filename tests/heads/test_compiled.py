"""A model compiled by torch.compile computes what it computes uncompiled, in one graph, whatever is attached to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import headwise as hw
from cases import cases
from heads.forwards import checkpoint_activations

# torch's own, while it traces
TRACING = [pytest.mark.filterwarnings("ignore:.* should not be instantiated. Methods on autograd functions")]

pytestmark = [pytest.mark.full, *TRACING]

TOKENS, WIDTH, HEADS = 7, 32, 4


def bert(layers: int = 2) -> BertModel:
    """A model that calls its attention through the interface of transformers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": 16, "vocab_size": 50}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertModel(BertConfig(num_hidden_layers=layers, **sizes, **still), add_pooling_layer=False).train()


def encoder(layers: int = 2) -> nn.TransformerEncoder:
    """A model of torch's own layers."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def inputs_of(model: nn.Module, tokens: int = TOKENS, seed: int = 0) -> dict[str, Tensor]:
    """Two sentences, the second with padding."""
    generator = torch.Generator().manual_seed(seed)
    keep = torch.ones(2, tokens, dtype=torch.bool)
    keep[1, tokens - 2 :] = False
    if isinstance(model, nn.TransformerEncoder):
        states = torch.randn(2, tokens, WIDTH, generator=generator, requires_grad=True)
        return {"src": states, "src_key_padding_mask": ~keep}
    ids = torch.randint(50, (2, tokens), generator=generator)
    return {"input_ids": ids, "attention_mask": keep.long(), "use_cache": False}


def mask_of(tokens: int = TOKENS, seed: int = 0) -> hw.roles.HeadMask:
    roles = torch.rand(2, 2, tokens, tokens, generator=torch.Generator().manual_seed(seed)) < 0.4
    return hw.roles.HeadMask(roles, None, HEADS, (1, 0))


def output_of(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result.last_hidden_state


MODELS = {"transformers": bert, "torch": encoder}
EVERY_TERM = (
    hw.similarity.Output() + hw.similarity.Subspace() + 0.3 * hw.similarity.Position() + hw.similarity.Frobenius()
)
METHODS: dict[str, Callable[[hw.Heads], Any]] = {
    "nothing": lambda _heads: None,
    "taps": lambda heads: hw.Taps(heads, outputs=True, values=True, weights=True),
    "taps of the mean": lambda heads: hw.Taps(heads, mean_weights=True),
    "taps beside": lambda heads: hw.Taps(heads, weights=True, beside=True),
    "penalty": lambda heads: hw.Disagreement(heads, EVERY_TERM),
    "penalty recomputed": lambda heads: hw.Disagreement(heads, hw.similarity.Position(recompute=True)),
    "bias": lambda heads: hw.bias_heads(heads, torch.linspace(-2, 3, HEADS * TOKENS).view(1, HEADS, 1, TOKENS)),
    "function of bias": lambda heads: hw.bias_heads(
        heads, lambda site, call: torch.arange(call.keys * 1.0).view(1, 1, 1, call.keys) * (site.layer + 1)
    ),
    "guide": hw.guide,
    "guide every forward": lambda heads: hw.guide(heads, mask_of(), every_forward=True),
    "ablate": lambda heads: hw.ablate(heads, [0, 3]),
    "gate": lambda heads: hw.aggregate(heads, hw.routing.Gate()),
    "simple routing": lambda heads: hw.aggregate(heads, hw.routing.SimpleRouting(capsules=4)),
    "EM routing": lambda heads: hw.aggregate(heads, hw.routing.EMRouting(capsules=4)),
    "residual": lambda heads: hw.aggregate(heads, hw.routing.Residual(hw.routing.Trunk())),
}


COMMON = ("taps", "penalty", "bias", "guide", "ablate", "EM routing")


class Graphs:
    """A backend of torch.compile that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs: list) -> Callable:
        self.count += 1
        return graph.forward


def run(model: Any, handle: Any, inputs: dict, seed: int = 0) -> list[Tensor]:
    """What a step of a model computes: its output, what is read of it, and all gradients."""
    given = (
        {"role_mask": mask_of(seed=seed)} if isinstance(handle, hw.roles.Guidance) and not handle.every_forward else {}
    )
    output = output_of(model(**inputs, **given))
    loss, read = output.square().mean(), []
    if isinstance(handle, hw.Taps):
        for capture in handle.read():
            read += [tensor for tensor in (*capture.read, capture.key_keep) if tensor is not None]
    if isinstance(handle, hw.Disagreement):
        loss = loss + handle()
        read.append(loss)
    inner = getattr(model, "_orig_mod", model)
    inner.zero_grad()
    loss.backward()
    return [output, *read, *(parameter.grad.clone() for parameter in inner.parameters())]


def require_same(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


ATTACHED = [("transformers", method) for method in METHODS] + [("torch", method) for method in COMMON]


@cases(("name", "method"), ATTACHED)
def test_a_model_is_one_graph_with_everything_attached(name: str, method: str):
    model = MODELS[name]()
    handle = METHODS[method](hw.find_heads(model))
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for seed in range(4):
        inputs = inputs_of(model, seed=seed)
        expected = run(model, handle, inputs, seed)
        require_same(run(compiled, handle, inputs, seed), expected)
    assert graphs.count == 1
    if isinstance(handle, hw.heads.Ablation | hw.roles.Guidance | hw.heads.HeadBias):
        handle.check()


@pytest.mark.slow
@cases(("name", "method"), [("transformers", method) for method in COMMON] + [("torch", "penalty"), ("torch", "guide")])
def test_layers_compiled_one_by_one_share_a_graph(name: str, method: str):
    layers = torch._dynamo.config.recompile_limit + 2
    model = MODELS[name](layers)
    handle = METHODS[method](hw.find_heads(model))
    inputs = inputs_of(model)
    expected = run(model, handle, inputs)
    graphs = Graphs()
    for layer in model.layers if name == "torch" else model.encoder.layer:
        layer.compile(backend=graphs, fullgraph=True)
    for _ in range(2):
        require_same(run(model, handle, inputs), expected)
    assert graphs.count == 1


def test_a_step_with_its_penalty_is_one_graph():
    for build in MODELS.values():
        model = build()
        penalty = hw.Disagreement(hw.find_heads(model), EVERY_TERM)
        inputs = inputs_of(model)

        def step(model: nn.Module = model, penalty: hw.Disagreement = penalty, inputs: dict = inputs) -> Tensor:
            return output_of(model(**inputs)).square().mean() + penalty()

        graphs = Graphs()
        compiled = torch.compile(step, backend=graphs, fullgraph=True)
        for _ in range(3):
            expected = step()
            torch.testing.assert_close(compiled(), expected)
            compiled().backward()
        assert graphs.count == 1


def test_a_new_mask_compiles_nothing_and_a_new_length_once():
    model = bert()
    guidance = hw.guide(hw.find_heads(model))
    graphs = Graphs()

    @torch.compile(backend=graphs, fullgraph=True)
    def compiled(**batch: Any) -> Any:
        return model(**batch)

    counts = []
    for seed, tokens in enumerate((7, 7, 7, 9, 9, 11, 6)):
        inputs = {**inputs_of(model, tokens, seed), "role_mask": mask_of(tokens, seed)}
        expected = output_of(model(**inputs))
        torch.testing.assert_close(output_of(compiled(**inputs)), expected)
        counts.append(graphs.count)
    assert counts == [1, 1, 1, 2, 2, 2, 2]
    plain = inputs_of(model)
    with guidance.paused():
        torch.testing.assert_close(output_of(compiled(**plain)), output_of(model(**plain)))
    guidance.remove()
    torch.testing.assert_close(output_of(compiled(**plain)), output_of(model(**plain)))


def test_a_mask_that_is_missing_or_does_not_fit_is_told_in_a_compiled_model():
    model = bert()
    hw.guide(hw.find_heads(model))
    compiled = torch.compile(model, backend=Graphs())
    inputs = inputs_of(model)
    with pytest.raises(hw.errors.NotFired, match="this forward has no mask"):
        compiled(**inputs)
    with pytest.raises(hw.errors.MaskError, match="mask has 9 tokens and this call 7 queries"):
        compiled(**inputs, role_mask=mask_of(9))
    compiled(**inputs, role_mask=mask_of())
    with pytest.raises(hw.errors.MaskError, match="belongs to the previous forward"):
        compiled(**inputs)
    compiled(**inputs, role_mask=mask_of(seed=3))


# docs/gotchas.md names these; whatever else breaks a graph is a fault
@pytest.mark.slow
@cases(("method", "breaks"), [("penalty", 1), ("guide", 1), ("bias", 0)])
def test_only_what_leaves_an_activation_checkpoint_breaks_a_graph(method: str, breaks: int):
    model = bert()
    checkpoint_activations(model, reentrant=False)
    handle = METHODS[method](hw.find_heads(model))
    inputs = inputs_of(model)
    expected = run(model, handle, inputs)
    compiled = torch.compile(model, backend=Graphs())
    for _ in range(2):
        require_same(run(compiled, handle, inputs), expected)
    torch._dynamo.reset()
    explained = torch._dynamo.explain(model)(**inputs, **({"role_mask": mask_of()} if method == "guide" else {}))
    assert len(explained.break_reasons) == breaks
    assert all(str(reason.reason).startswith("HOP: ") for reason in explained.break_reasons)
