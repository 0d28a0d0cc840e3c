from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import AlbertConfig, AlbertModel, BertConfig, BertModel, GPT2Config, GPT2Model

import headwise as hw
from headwise.errors import DataError, NotFired, SettingError, ShapeError
from headwise.masks.head_mask import HeadMask
from headwise.report.prefix_cache import record
from headwise.report.removal_cost import measure_removal
from headwise.report.tables import make_comparison_rows, make_layer_rows

SMALL = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 20, "vocab_size": 30}


class Stack(nn.Module):
    """Layers of attention with a choice of what each does beside that."""

    def __init__(self, kind: str, layers: int = 3) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(12, 3, 16, batch_first=True, dropout=0.2) for _ in range(layers)
        )
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        first, self.seen = x, []
        for layer in self.layers:
            x = layer(x)
            if self.kind == "in place":
                x *= 1.5
            if self.kind == "skip":
                x = x + first
        return x


class Remembering(nn.Module):
    """A layer that tells the model something beside what it returns."""

    def __init__(self, model: list[Tensor]) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        self.model.append(x.mean() + 1)
        return x + self.attention(x, x, x)[0]


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[Tensor] = []
        self.layers = nn.ModuleList(Remembering(self.told) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.told.clear()
        for layer in self.layers:
            x = layer(x)
        return x * sum(self.told, torch.tensor(1.0))


class Sharing(nn.TransformerEncoderLayer):
    """A layer that keeps what it returns, or adds what another one kept."""

    def __init__(self, kept: dict[str, Tensor], place: int) -> None:
        super().__init__(12, 3, 16, batch_first=True)
        self.kept, self.place = kept, place

    def forward(self, src: Tensor, *args, **kwargs) -> Tensor:
        output = super().forward(src, *args, **kwargs)
        if self.place == 0:
            self.kept["first"] = output
        return output + self.kept["first"] if self.place == 2 else output


class Keeping(nn.Module):
    """Layers of which the first keeps what it returned for the last, and what the model does before them."""

    def __init__(self, before: str) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        self.before = before
        self.layers = nn.ModuleList(Sharing(self.kept, place) for place in range(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.before == "forget":
            self.kept.clear()
        if self.before == "noise":
            x = x + 0.1 * torch.randn_like(x)
        for layer in self.layers:
            x = layer(x)
        return x


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 5, 12, generator=generator), torch.randn(2, 6, 12, generator=generator)]


def ids() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    keep = torch.ones(3, 7, dtype=torch.int64)
    keep[1, 4:] = 0
    return [
        {"input_ids": torch.randint(1, 30, (3, 7), generator=generator), "attention_mask": keep},
        {"input_ids": torch.randint(1, 30, (2, 5), generator=generator)},
    ]


def spread(output: object, _batch: object) -> Tensor:
    states = output if isinstance(output, Tensor) else output.last_hidden_state  # pyright: ignore[reportAttributeAccessIssue]
    return states[:, 0, :3].square().sum(-1)


def run(model: nn.Module, batch) -> object:
    return model(batch) if isinstance(batch, Tensor) else model(**batch)


MODELS = {
    "torch": (lambda: Stack("plain"), tensors),
    "a skip around every layer": (lambda: Stack("skip"), tensors),
    "changed in place": (lambda: Stack("in place"), tensors),
    "BERT": (lambda: BertModel(BertConfig(num_hidden_layers=3, **SMALL)), ids),
    "ALBERT, one layer for all": (
        lambda: AlbertModel(AlbertConfig(num_hidden_layers=3, embedding_size=8, **SMALL)),
        ids,
    ),
    "GPT-2": (lambda: GPT2Model(GPT2Config(n_layer=3, n_embd=16, n_head=4, vocab_size=30, n_positions=16)), ids),
    "a layer that tells": (Told, tensors),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_a_head_costs_is_to_the_bit_that_of_whole_forwards(name: str):
    torch.manual_seed(0)
    make, batches = MODELS[name]
    model = make().eval()
    heads = hw.find_heads(model)
    found = measure_removal(heads, batches(), run, spread)
    by_importance = torch.stack(
        [torch.cat([spread(run(model, batch), batch).double().detach() for batch in batches()])]
    )
    assert torch.equal(found.whole, by_importance[0])
    for site in heads:
        for head in range(site.num_heads):
            with hw.ablate(hw.find_heads(model).where(site.name), head):
                without = torch.cat([spread(run(model, batch), batch).double().detach() for batch in batches()])
            assert torch.equal(found.drops[site.name][head], found.whole - without)
            assert found.drops[site.name][head].abs().max() > 0


def test_it_is_said_whether_forwards_were_whole_and_why():
    torch.manual_seed(0)
    batches = tensors()
    model = Stack("plain").eval()
    assert measure_removal(hw.find_heads(model), batches, run, spread).replayed
    told = Told().eval()
    found = measure_removal(hw.find_heads(told), batches, run, spread)
    assert not found.replayed
    assert "returned other numbers" in found.reason
    report = hw.measure(told, hw.find_heads(told), batches, score=spread)
    assert any("every forward pass without a head was computed in full" in note for note in report.notes)
    one = Stack("plain", layers=1).eval()
    assert measure_removal(hw.find_heads(one), batches, run, spread).reason == "no layer ends before another begins"


def test_what_ran_before_a_head_does_not_run_again():
    torch.manual_seed(0)
    model = BertModel(BertConfig(num_hidden_layers=3, **SMALL)).eval()
    heads, (batch, _) = hw.find_heads(model), ids()
    calls: list[str] = []
    for name, module in model.named_modules():
        if name.endswith(("query", "intermediate.dense")):
            module.forward = counting(module.forward, calls, name)
    with torch.no_grad(), record(heads) as recording:
        model(**batch)
    calls.clear()
    with torch.no_grad(), recording.before(heads.sites[1]) as spared:
        model(**batch)
    assert spared == 3  # the embeddings, the layer before, and what the heads attend with
    assert calls == [
        f"encoder.layer.{part}" for part in ("1.intermediate.dense", "2.attention.self.query", "2.intermediate.dense")
    ]
    calls.clear()
    model(**batch)
    assert len(calls) == 6


def counting(forward, calls: list[str], name: str):
    def counted(*args, **kwargs):
        calls.append(name)
        return forward(*args, **kwargs)

    return counted


def test_an_output_that_was_changed_in_place_is_never_given_back():
    torch.manual_seed(0)
    model = Stack("in place").eval()
    with torch.no_grad(), record(hw.find_heads(model)) as recording:
        model(tensors()[0])
    assert set(recording.changed) == {"layers.0", "layers.1", "layers.2"}
    # what was not changed is given back still
    assert measure_removal(hw.find_heads(model), tensors(), run, spread).replayed


def test_the_numbers_of_a_report_are_the_metrics():
    torch.manual_seed(0)
    model = BertModel(BertConfig(num_hidden_layers=2, **SMALL)).train()
    model.encoder.layer[0].eval()
    heads, batches = hw.find_heads(model), ids()[:1]
    report = hw.measure(model, heads, batches)
    assert model.training
    assert not model.encoder.layer[0].training
    model.eval()
    with torch.no_grad(), hw.Taps(heads, outputs=True, values=True, weights=True) as taps:
        model(**batches[0])
        captures = taps.read()
    assert report.tokens == 18
    for layer, capture in zip(report.layers, captures, strict=True):
        keep = capture.query_keep
        for measure, expected in {
            "output_cosine": hw.metrics.output_cosine(capture.outputs, keep),
            "output_distance": hw.metrics.head_distance(capture.outputs, keep),
            "output_cka": hw.metrics.linear_cka(capture.outputs, keep),
            "value_cosine": hw.metrics.output_cosine(capture.values, keep),
            "attention_js": hw.metrics.attention_jensen_shannon(capture.weights, keep),
        }.items():
            assert layer.mean(measure) == pytest.approx(float(expected), abs=1e-6)
        assert layer.entropy == pytest.approx(hw.metrics.attention_entropy(capture.weights, keep).tolist(), abs=1e-6)
        particles = capture.site.slices[1].view(capture.site.slices[1].parameter.detach()).flatten(1)
        assert layer.mean("key_cosine") == pytest.approx(float(hw.metrics.parameter_cosine(particles).mean), abs=1e-6)
        for term, similarity in {"output": hw.Output(), "subspace": hw.Subspace(), "position": hw.Position()}.items():
            with torch.no_grad():
                one = hw.Disagreement(heads.layer(layer.layer), similarity)
                model(**batches[0])
                assert layer.terms[term] == pytest.approx(float(one()), abs=1e-6)
                one.remove()
    assert report.whole is None
    assert report.layers[0].drops == ()


def test_how_far_heads_play_roles_is_told():
    torch.manual_seed(0)
    model = BertModel(BertConfig(num_hidden_layers=2, **SMALL))
    itself = HeadMask(torch.eye(7, dtype=torch.bool)[None, None], num_heads=4, names=("itself",))
    report = hw.measure(model, hw.find_heads(model), ids()[:1], roles=lambda _batch: itself)
    assert report.roles == ("itself",)
    layer = report.layers[1]
    # 14 queries see 7 keys and 4 see 4
    assert layer.chance == (pytest.approx((14 / 7 + 4 / 4) / 18),)
    assert len(layer.roles[0]) == 4
    assert all(0 < share < 1 for share in layer.roles[0])
    best = max(range(4), key=lambda head: layer.roles[0][head])
    shown = f"{100 * layer.roles[0][best]:.0f} % ({100 * layer.chance[0]:.0f} %), head {best}"
    assert shown in str(report)
    console = Console(width=80)
    with console.capture() as capture:
        console.print(report)
    assert shown in capture.get()
    assert "The head that attends most to each role" in capture.get()


def test_what_cannot_be_read_is_left_out_and_said():
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads = 3
            self.query, self.key, self.value, self.out_proj = (nn.Linear(12, 12) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (layer(x).unflatten(-1, (3, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value))
            weights = torch.softmax(q @ k.mT / 2, -1)
            return self.out_proj((weights @ v).transpose(1, 2).flatten(2))

    model = Plain()
    report = hw.measure(model, hw.find_heads(model), tensors(), score=spread)
    assert "attention_js" not in report.layers[0].pairs
    assert "output_cosine" in report.layers[0].pairs
    assert any("attention weights of Plain cannot be read" in note for note in report.notes)


def measured() -> hw.Report:
    torch.manual_seed(0)
    model = Stack("plain")
    return hw.measure(model, hw.find_heads(model), tensors(), score=spread, score_name="spread")


def test_a_report_comes_back_from_its_file(tmp_path):
    report = measured()
    report.save(tmp_path / "report.json")
    assert hw.load_report(tmp_path / "report.json") == report
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    text = (tmp_path / "report.json").read_text()
    for damage in (text[:-30], "[]", text.replace('"layers"', '"layer"'), text.replace('"low"', '"lowest"')):
        (tmp_path / "damaged.json").write_text(damage)
        with pytest.raises(DataError, match=r"damaged\.json"):
            hw.load_report(tmp_path / "damaged.json")
    with pytest.raises(DataError, match="cannot be read"):
        hw.load_report(tmp_path / "absent.json")
    assert json.loads(text)["score"] == "spread"


def test_two_reports_stand_beside_one_another_only_if_their_models_have_one_shape():
    before, model = measured(), Stack("plain")
    after = hw.measure(model, hw.find_heads(model), tensors(), score=spread)
    shown = str(after.compare(before))
    change = after.layers[1].mean("output_cosine") - before.layers[1].mean("output_cosine")
    assert f"{change:+.3f}".replace("-", "\N{MINUS SIGN}") in shown
    weighted = after.layers[1].effective_heads_weighted - before.layers[1].effective_heads_weighted
    assert f"{weighted:+.3f}".replace("-", "\N{MINUS SIGN}") in shown
    other = Stack("plain", layers=2)
    with pytest.raises(SettingError, match="3 and 2 modules"):
        hw.measure(other, hw.find_heads(other), tensors()).compare(before)


def test_effective_heads_come_first_then_what_no_trick_fools_then_the_papers_measures():
    header, _ = make_layer_rows(measured().layers)
    order = ["effective heads", "by variance", "CKA", "attention JS", "output CKA", "output cosine"]
    assert [name for name in header if name in order] == order
    header, _ = make_comparison_rows(measured().layers, measured().layers)
    order = ["effective heads", "by variance", "CKA", "attention JS", "output cosine"]
    assert [name for name in header if name in order] == order


def test_the_tables_hold_the_numbers(capsys):
    from rich.console import Console

    report = measured()
    assert f"{report.layers[2].mean('output_cka'):.3f}" in str(report)
    console = Console(width=80)
    console.print(report)
    console.print(report.head_table())
    shown = capsys.readouterr().out
    assert f"{report.layers[0].entropy[1]:.3f}" in shown
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown.split("95 %")[0]
    assert report.summary.startswith("Stack: 9 heads in 3 attention modules, 27 tokens; spread ")


def test_progress_is_told_to_the_end():
    seen: list[tuple[int, int]] = []
    model = Stack("plain")
    hw.measure(
        model, hw.find_heads(model), tensors(), score=spread, advance=lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (20, 20)  # two batches, each once whole, which is read, and once without each of nine heads
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_what_cannot_be_measured_is_refused():
    model, other = Stack("plain"), Stack("plain")
    heads = hw.find_heads(model)
    with pytest.raises(SettingError, match="heads belong to another model"):
        hw.measure(other, heads, tensors())
    with pytest.raises(SettingError, match="no batch"):
        hw.measure(model, heads, [])
    with pytest.raises(SettingError, match="a batch is a tuple"):
        hw.measure(model, heads, [(1, 2)])
    with pytest.raises(ShapeError, match="score returned float; expected a tensor with one number per item"):
        hw.measure(model, heads, tensors(), score=lambda output, _: float(output.mean()))
    with pytest.raises(ShapeError, match="score returned nan"):
        hw.measure(model, heads, tensors(), score=lambda output, _: output[:, 0, 0] * float("nan"))
    with pytest.raises(NotFired, match="were not called"):
        hw.measure(model, heads, tensors(), forward=lambda _model, batch: batch)
    assert model.training


@pytest.mark.parametrize("before", ["", "forget"])
def test_what_a_layer_keeps_for_a_later_one_is_seen_and_every_forward_computed_whole(before: str):
    torch.manual_seed(0)
    model = Keeping(before).eval()
    heads, told = hw.find_heads(model), []
    fast = measure_removal(heads, tensors(), run, spread, advance=told.append)
    slow = measure_removal(heads, tensors(), run, spread, replay=False)
    assert not fast.replayed
    assert ("KeyError" if before else "other numbers") in fast.reason
    assert all(torch.equal(fast.drops[name], slow.drops[name]) for name in slow.drops)
    # a forward a head and batch, and the whole one
    assert sum(told) == 2 * (9 + 1)


def test_a_model_that_draws_is_computed_whole():
    model = Keeping("noise").eval()
    assert not measure_removal(hw.find_heads(model), tensors(), run, spread).replayed


def test_a_guided_model_is_measured_with_the_masks_of_its_batches():
    model = BertModel(BertConfig(num_hidden_layers=3, **SMALL)).eval()
    heads = hw.find_heads(model)
    batches = [
        {**batch, "role_mask": hw.Roles(hw.Window(3))(tables, num_heads=4)}
        for batch, size in zip(ids(), (7, 5), strict=True)
        for tables in [[hw.WordTable([f"w{place}" for place in range(size)])] * len(batch["input_ids"])]
    ]

    def measured(*, replay: bool) -> hw.Report:
        return hw.measure(model, heads, batches, score=lambda out, _: out[0][:, 0].sum(-1), replay=replay)

    with hw.guide(heads):
        fast, slow = measured(replay=True), measured(replay=False)
        assert (fast.replayed, slow.replayed) == (True, False)
        for one, other in zip(fast.layers, slow.layers, strict=True):
            assert [drop.value for drop in one.drops] == pytest.approx([drop.value for drop in other.drops], abs=1e-6)
    # in a forward of one's own a silent site is a fault as before
    with pytest.raises(NotFired, match="2 of 3 attentions"), hw.guide(heads, batches[1]["role_mask"]):
        model.encoder.layer[0](torch.randn(2, 5, 16))


def test_numbers_that_are_none_are_refused_by_the_site():
    model = Stack("plain").eval()
    model.layers[1].self_attn.in_proj_bias.data[-1] = float("nan")
    with pytest.raises(DataError, match=r"layers\.1\.self_attn: .* of its heads is not finite on these batches"):
        hw.measure(model, hw.find_heads(model), tensors())


def test_drops_of_two_scores_do_not_stand_beside_one_another():
    model = Stack("plain").eval()
    heads = hw.find_heads(model)
    one, same, other = (hw.measure(model, heads, tensors(), score=spread, score_name=name) for name in ("a", "a", "b"))
    assert "mean drop" in str(one.compare(same))
    assert "mean drop" not in str(one.compare(other))


def test_one_token_has_no_cka_and_the_note_says_so():
    model = Stack("plain").eval()
    report = hw.measure(model, hw.find_heads(model), [torch.randn(1, 1, 12)])
    assert "output_cka" not in report.layers[0].pairs
    assert any("CKA was omitted: it needs at least two tokens" in note for note in report.notes)


def test_spans_are_the_mean_squared_cosine_of_principal_angles():
    torch.manual_seed(4)
    layer = nn.MultiheadAttention(12, 3, batch_first=True).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    report = hw.measure(layer, hw.find_heads(layer), [{"query": x, "key": x, "value": x, "need_weights": False}])
    rows = dict(zip(("query", "key", "value"), layer.in_proj_weight.detach().chunk(3), strict=True))
    columns = {name: weight.unflatten(0, (3, 4)).mT for name, weight in rows.items()}
    columns["output"] = layer.out_proj.weight.detach().unflatten(1, (3, 4)).transpose(0, 1)
    for name, heads in columns.items():
        bases = [torch.linalg.qr(head)[0] for head in heads]
        for i in range(3):
            for j in range(3):
                cosines = torch.linalg.svdvals(bases[i].mT @ bases[j])
                assert report.layers[0].pairs[f"{name}_span"][i][j] == pytest.approx(float(cosines.square().mean()))
