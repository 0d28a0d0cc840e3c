"""Talking heads: the equation, the same model at the start, and refusals of what would not be trained or applied."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headwise as hw
from cases import cases
from heads.calling import CallingAttention, CausalSelfAttention
from heads.families import BY_NAME, REACHED, WRITTEN, sweep
from heads.family import Family
from heads.forwards import copies, require_same_gradients, results, same, weighed
from headwise.nn.mixing import HeadMixer, find_mixer
from reference.attention import talking_heads

# What comes after P_l in these is another number for each head: sinks, a cap, position biases.
UNEQUAL = ("GPT-OSS", "T5", "timm Swin")


def draw(mixer: HeadMixer, seed: int) -> None:
    """Give a mixer matrices near the identity, none of whose entries is 0 or 1."""
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for matrix in (mixer.logits, mixer.weights):
            if matrix is not None:
                matrix.add_(torch.randn(matrix.shape, generator=drawn).to(matrix.dtype), alpha=0.4)


def mixed(model: nn.Module, **which: bool) -> hw.heads.HeadMixing:
    mixing = hw.mix_heads(hw.find_heads(model), **which)
    for seed, mixer in enumerate(mixing.mixers.values()):
        draw(mixer, seed)
    return mixing


def attention(dropout: float = 0.0) -> hw.nn.MultiheadAttention:
    torch.manual_seed(0)
    return hw.nn.MultiheadAttention(12, 3, batch_first=True, dropout=dropout).double()


X = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
ALLOWED = torch.rand(2, 3, 5, 5, generator=torch.Generator().manual_seed(4)) > 0.4
ALLOWED[1, 0, 2] = False
ALLOWED[1, 2, 4] = False


@cases("need_weights", [False, True])
@cases("which", [{"logits": True, "weights": False}, {"logits": False, "weights": True}, {}])
def test_multihead_attention_talks_as_the_loop_says(which, need_weights: bool):
    module = attention()
    mixer = mixed(module, **which).mixers[""]
    q, k, v = (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in module._project(X, X, X))
    eye = torch.eye(3, dtype=torch.float64)
    matrices = [eye if matrix is None else matrix.detach() for matrix in (mixer.logits, mixer.weights)]
    assert [torch.equal(matrix, eye) for matrix in matrices] == [
        not which.get(name, True) for name in ("logits", "weights")
    ]
    maps, outputs = talking_heads(q, k, v, ALLOWED, *matrices)
    with hw.Taps(hw.find_heads(module), weights=True, outputs=True, mean_weights=True) as taps:
        forbidden = (~ALLOWED).flatten(0, 1)
        returned, own = module(X, X, X, attn_mask=forbidden, need_weights=need_weights, average_attn_weights=False)
        (capture,) = taps.read()
    torch.testing.assert_close(capture.weights, maps, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(capture.mean_weights, maps.mean(1), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(capture.outputs.transpose(1, 2), outputs, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(returned, module.out_proj(outputs.transpose(1, 2).flatten(2)), rtol=1e-11, atol=1e-12)
    assert not capture.weights[1, 0, 2].any()
    if need_weights:
        torch.testing.assert_close(own, torch.einsum("hg,bhqk->bgqk", matrices[1], maps), rtol=1e-11, atol=1e-12)


@cases("settings", [{}, {"causal": True}, {"key_value_heads": 2}, {"key_value_heads": 1, "scale": 0.7}])
def test_attention_that_calls_the_fused_kernel_talks_as_the_loop_says(settings):
    torch.manual_seed(0)
    module = CallingAttention(**settings).double()
    (mixer,) = mixed(module).mixers.values()
    allowed = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(1)) > 0.4
    allowed[0, 0, 2] = False
    mask = None if settings.get("causal") else allowed
    whole = torch.ones(5, 5).tril().bool().expand(2, 4, 5, 5) if mask is None else mask.expand(2, 4, 5, 5)
    q, k, v = module.project(X)
    k, v = (part.repeat_interleave(4 // part.shape[1], 1) for part in (k, v))
    scaled = q * (settings.get("scale", 5**-0.5) * 5**0.5)
    maps, outputs = talking_heads(scaled, k, v, whole, mixer.logits.detach(), mixer.weights.detach())
    expected = module.o_proj(outputs.transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(X, mask), expected, rtol=1e-11, atol=1e-12)
    with hw.Taps(hw.find_heads(module), weights=True, beside=True) as taps:
        torch.testing.assert_close(module(X, mask), expected, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(taps.read()[0].weights, maps, rtol=1e-11, atol=1e-12)


@cases("implementation", ["its own", "eager"])
@sweep(REACHED)
def test_every_family_starts_as_it_was_then_mixes_and_comes_back(family: Family, implementation: str):
    if implementation == "eager" and not family.interface:
        # it has one implementation
        return
    model, inputs = family.build(), family.inputs(padded=family.maskable)
    if implementation == "eager":
        model.set_attn_implementation(implementation)
    heads = hw.find_heads(model)
    # stock modules change class
    [site.expose() for site in heads]
    before = results(model, inputs)
    with hw.Taps(heads, weights=True) as taps:
        results(model, inputs)
        plain = taps.read()
    written = family.name in WRITTEN
    if written:
        with pytest.raises(hw.errors.LayoutError, match=r"writes its softmax out.*pass logits=False"):
            hw.mix_heads(heads)
    mixing = hw.mix_heads(heads, logits=not written)
    torch.testing.assert_close(before, results(model, inputs), atol=3e-6, rtol=1e-4)
    for seed, mixer in enumerate(mixing.mixers.values()):
        draw(mixer, seed)
    with hw.Taps(heads, weights=True, values=True, outputs=True) as taps:
        after = results(model, inputs)
        talking = taps.read()
    assert not torch.allclose(before[0], after[0], atol=1e-3)
    first = plain[0].site
    for was, now in zip(plain, talking, strict=True):
        mixer, site = mixing.mixers[now.site.name], now.site
        if site.module is first.module and family.name not in UNEQUAL and was is plain[0] and not written:
            # the logarithm of a softmax is the scores but for a number of each query, which the next one forgets
            scores = torch.einsum("hg,bhqk->bgqk", mixer.logits, was.weights.clamp_min(1e-30).log())
            forbidden = (was.weights == 0).all(1, keepdim=True)
            rows = ~forbidden.all(-1, keepdim=True)
            expected = scores.masked_fill(forbidden & rows, -torch.inf).softmax(-1) * rows
            torch.testing.assert_close(now.weights, expected, atol=2e-5, rtol=1e-3)
        if family.name != "NeoMME":
            # NeoMME gates its heads
            values = now.values.repeat_interleave(site.num_heads // site.key_value_heads, dim=2)
            summed = torch.einsum("hg,bhqk,bkge->bqge", mixer.weights, now.weights, values)
            torch.testing.assert_close(now.outputs, summed, atol=1e-5, rtol=1e-4)
    sum(weighed(found) for found in results(model, inputs) if found.is_floating_point()).backward()
    mixers = mixing.mixers.values()
    assert all(bool(parameter.grad.isfinite().all()) for mixer in mixers for parameter in mixer.parameters())
    assert all(bool((mixer.weights.grad != 0).any()) for mixer in mixers)
    # a text of CLIP is pooled at its first token, which has one key
    assert written or any(bool((mixer.logits.grad != 0).any()) for mixer in mixers)
    mixing.remove()
    assert same(before, results(model, inputs))
    assert not any("head_mixer" in name for name, _ in model.named_parameters())


@cases("name", ["BERT", "torch.nn.Transformer"])
def test_what_is_read_beside_the_attention_is_what_it_attends_with(name: str):
    family = BY_NAME[name]
    model, inputs = family.build(), family.inputs(padded=True)
    plain = results(model, inputs)
    mixed(model)
    talking = results(model, inputs)
    assert not torch.allclose(plain[0], talking[0], atol=1e-3)
    for beside in (False, True):
        with hw.Taps(hw.find_heads(model), weights=True, beside=beside):
            assert same(results(model, inputs), talking)


@cases("talking", [False, True])
def test_heads_of_projected_tensors_are_those_of_the_forward(talking: bool):
    module = attention()
    if talking:
        mixed(module)
    q, k, v = (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in module._project(X, X, X))
    for allowed in (None, ALLOWED):
        mask = None if allowed is None else (~allowed).flatten(0, 1)
        with hw.Taps(hw.find_heads(module), outputs=True) as taps:
            module(X, X, X, attn_mask=mask, need_weights=False)
            expected = taps.read()[0].outputs.transpose(1, 2)
        torch.testing.assert_close(module.attend_heads(q, k, v, allowed), expected)


def test_gradients_are_those_of_finite_differences():
    module = attention()
    mixer = mixed(module).mixers[""]
    names = ["head_mixer.logits", "head_mixer.weights", "in_proj_weight"]
    mask = (~ALLOWED).flatten(0, 1)

    def run(x: Tensor, *given: Tensor) -> Tensor:
        call = {"attn_mask": mask, "need_weights": False}
        return torch.func.functional_call(module, dict(zip(names, given, strict=True)), (x, x, x), call)[0]

    parameters = [mixer.logits, mixer.weights, module.in_proj_weight]
    inputs = [X, *parameters]
    given = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    assert torch.autograd.gradcheck(run, given, fast_mode=True)


def test_dropout_comes_after_both_matrices():
    module = attention(dropout=0.5).train()
    mixer = mixed(module).mixers[""]
    with hw.Taps(hw.find_heads(module), weights=True, values=True, outputs=True) as taps:
        torch.manual_seed(5)
        module(X, X, X)
        (capture,) = taps.read()
    torch.manual_seed(5)
    # the draw follows the order in memory
    mixture = torch.einsum("hg,bhqk->bgqk", mixer.weights, capture.weights).contiguous()
    dropped = nn.functional.dropout(mixture, 0.5)
    torch.testing.assert_close(capture.outputs, torch.einsum("bgqk,bkge->bqge", dropped, capture.values))


@cases("reentrant", [False, True])
def test_recomputed_activations_give_the_same_gradients(reentrant: bool):
    def step(model: nn.Module) -> None:
        mixed(model)
        results(model, BY_NAME["BERT"].inputs(padded=True))[0].square().mean().backward()

    require_same_gradients("BERT", step, reentrant=reentrant)
    for build in (CallingAttention, partial(nn.TransformerEncoderLayer, 12, 3, 8, 0.0)):
        torch.manual_seed(0)
        model, gradients = build().double(), []
        mixed(model)
        for call in (model, partial(checkpoint, model, use_reentrant=reentrant)):
            model.zero_grad()
            call(X.clone().requires_grad_()).square().mean().backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        torch.testing.assert_close(*gradients)


def test_copies_of_torch_attention_talk_and_others_refuse_until_they_are_mixed_again():
    module = attention()
    mixed(module)
    for twin in copies(module):
        assert torch.equal(twin(X, X, X)[0], module(X, X, X)[0])
    for model, call in (
        (BY_NAME["BERT"].build(), lambda model: results(model, BY_NAME["BERT"].inputs())[0]),
        (CallingAttention().double(), lambda model: model(X)),
    ):
        mixed(model)
        for twin in copies(model):
            with pytest.raises(
                hw.errors.NotFired, match=r"it is a copy.*Call hw\.mix_heads\(hw\.find_heads\(model\)\)"
            ):
                call(twin)
            with pytest.raises(hw.errors.LayoutError, match=r"a copy that holds matrices \(logits, weights\)"):
                hw.mix_heads(hw.find_heads(twin), weights=False)
            again = hw.mix_heads(hw.find_heads(twin))
            assert torch.equal(call(twin), call(model))
            again.remove()
            assert not torch.equal(call(twin), call(model))


# torch's own, where a graph ends between the projections and the scores
@pytest.mark.full
def test_a_model_compiled_before_talks_as_one_that_is_not():
    model = nn.TransformerEncoderLayer(12, 3, 8, 0.0, batch_first=True).double().eval()
    [site.expose() for site in hw.find_heads(model)]
    compiled = torch.compile(model, backend="aot_eager")
    plain = compiled(X)
    mixing = mixed(model)
    torch.testing.assert_close(compiled(X), model(X))
    assert not torch.allclose(compiled(X), plain)
    mixing.remove()
    torch.testing.assert_close(compiled(X), plain)


def test_matrices_follow_the_model_and_its_state():
    model = BY_NAME["BERT"].build().bfloat16()
    mixing = mixed(model)
    assert {mixer.logits.dtype for mixer in mixing.mixers.values()} == {torch.bfloat16}
    names = {name for name in model.state_dict() if "head_mixer" in name}
    assert names == {f"{site.name}.head_mixer.{matrix}" for site in mixing.heads for matrix in ("logits", "weights")}
    assert results(model, BY_NAME["BERT"].inputs())[0].isfinite().all()
    other = BY_NAME["BERT"].build()
    hw.mix_heads(hw.find_heads(other))
    other.load_state_dict(model.state_dict())
    assert find_mixer(mixing.heads.sites[0].module).reset_parameters() is None
    assert torch.equal(mixing.mixers[mixing.heads.sites[0].name].weights, torch.eye(4, dtype=torch.bfloat16))
    assert str(mixing) == "HeadMixing(HeadMixer(logits, weights) in 2 sites)"


def test_peft_trains_and_saves_the_matrices_it_is_told_of():
    peft = pytest.importorskip("peft")
    family = BY_NAME["BERT"]
    model, inputs = family.build().train(), family.inputs()
    mixing = mixed(model)
    before = results(model.eval(), inputs)[0]
    names = [f"{site.name}.query" for site in mixing.heads]
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=names, modules_to_save=["head_mixer"]))
    torch.testing.assert_close(results(adapted.eval(), inputs)[0], before)
    weighed(results(adapted.train(), inputs)[0]).backward()
    found = {name: parameter for name, parameter in adapted.named_parameters() if "head_mixer" in name}
    trained = [name for name, parameter in found.items() if parameter.grad is not None]
    assert len(trained) == 4
    assert all("modules_to_save" in name for name in trained)
    with pytest.raises(hw.errors.LayoutError, match=r"holds adapters of peft.*modules_to_save=\['head_mixer'\]"):
        hw.mix_heads(hw.find_heads(adapted))


def test_matrices_that_peft_froze_at_their_start_are_refused():
    peft = pytest.importorskip("peft")
    family = BY_NAME["BERT"]
    model = family.build()
    mixing = hw.mix_heads(hw.find_heads(model))
    names = [f"{site.name}.query" for site in mixing.heads]
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=names, lora_dropout=0.0)).train()
    with pytest.raises(hw.errors.SettingError, match=r"its new mixer of heads is frozen.*modules_to_save"):
        results(adapted, family.inputs())


def test_aggregators_go_with_talking_heads_and_a_folder_that_could_not_be_loaded_is_not_written(tmp_path):
    model = BY_NAME["BERT"].build()
    mixed(model)
    hw.aggregate(hw.find_heads(model), hw.routing.Trunk())
    assert results(model, BY_NAME["BERT"].inputs())[0].isfinite().all()
    with pytest.raises(
        hw.errors.DataError, match=r"has talking heads, which load.* does not make; save its state_dict"
    ):
        model.save_pretrained(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_a_forward_that_does_not_call_attention_is_refused():
    model = CausalSelfAttention(dropout=0.0)
    mixed(model)
    model.flash = False
    with pytest.raises(hw.errors.LayoutError, match="writes its softmax out, and scores are mixed before their masks"):
        model(X.float())


class Replicated(nn.parallel.DistributedDataParallel):
    """Its shape without processes."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


class OwnForward(hw.nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def own_mixer() -> hw.nn.MultiheadAttention:
    module = attention()
    module.head_mixer = nn.Linear(2, 2)
    return module


REFUSED = {
    "additive": (lambda: hw.nn.AdditiveAttention(12, 4, 3), "computes its scores otherwise"),
    "written": (BY_NAME["Bloom"].build, "writes its softmax out"),
    "unreached": (BY_NAME["WavLM"].build, "computes its scores otherwise"),
    "a forward of its own": (lambda: OwnForward(12, 3), "whose forward is its own"),
    "one head": (lambda: hw.nn.MultiheadAttention(12, 1), "has one head"),
    "replicated": (lambda: Replicated(attention()), "wrapped by DistributedDataParallel"),
    "a name that is taken": (own_mixer, "attribute 'head_mixer' of its own"),
}


@cases("what", REFUSED)
def test_what_would_not_be_trained_or_not_be_applied_is_refused(what: str):
    build, message = REFUSED[what]
    model = build()
    before = list(model.state_dict())
    with pytest.raises(hw.errors.LayoutError, match=message):
        hw.mix_heads(hw.find_heads(model))
    assert list(model.state_dict()) == before


def test_a_second_mixer_and_one_that_mixes_nothing_are_refused():
    module = attention()
    heads = hw.find_heads(module)
    for mix in (partial(hw.mix_heads, heads), partial(HeadMixer, 3)):
        with pytest.raises(hw.errors.SettingError, match="neither matrix"):
            mix(logits=False, weights=False)
    with pytest.raises(hw.errors.SettingError, match="num_heads is 1"):
        HeadMixer(1)
    handle = hw.mix_heads(heads)
    with pytest.raises(hw.errors.LayoutError, match=r"has talking heads already; call remove\(\)"):
        hw.mix_heads(heads)
    module.head_mixer = HeadMixer(3)
    with pytest.raises(hw.errors.HeadwiseError, match="no longer has the matrices of this mix_heads"):
        handle.remove()
