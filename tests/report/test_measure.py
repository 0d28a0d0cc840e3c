"""The report of `measure`: its numbers, its tables, its file, and what is refused or left out."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import headwise as hw
from cases import cases
from headwise.errors import DataError, NotFired, SettingError, ShapeError
from headwise.masks.head_mask import HeadMask
from headwise.report.layer import LayerReport
from headwise.report.measure import _read_first
from headwise.report.tables import make_comparison_rows, make_layer_rows, make_rich_table
from report.stack import SMALL, Stack, ids, spread, tensors


def test_the_numbers_of_a_report_are_the_metrics():
    torch.manual_seed(0)
    model = BertModel(BertConfig(num_hidden_layers=2, **SMALL)).train()
    model.encoder.layer[0].eval()
    heads, batches = hw.find_heads(model), ids()[:1]
    report = hw.measure(heads, batches)
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
        first = (capture.weights[..., 0] * keep[:, None]).sum((0, 2)) / keep.sum()
        assert layer.first == pytest.approx(first.tolist(), abs=1e-6)
        assert layer.entropy == pytest.approx(hw.metrics.attention_entropy(capture.weights, keep).tolist(), abs=1e-6)
        particles = capture.site.slices[1].of(capture.site.slices[1].parameter.detach()).flatten(1)
        assert layer.mean("key_cosine") == pytest.approx(float(hw.metrics.parameter_cosine(particles).mean), abs=1e-6)
        for term, similarity in {
            "output": hw.similarity.Output(),
            "subspace": hw.similarity.Subspace(),
            "position": hw.similarity.Position(),
        }.items():
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
    report = hw.measure(hw.find_heads(model), ids()[:1], roles=lambda _batch: itself)
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
            weights = (q @ k.mT / 2).exp()
            return self.out_proj((weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2))

    model = Plain()
    report = hw.measure(hw.find_heads(model), tensors(), score=spread)
    assert "attention_js" not in report.layers[0].pairs
    assert "output_cosine" in report.layers[0].pairs
    assert any("attention weights of Plain cannot be read" in note for note in report.notes)


def measured() -> hw.report.Report:
    torch.manual_seed(0)
    model = Stack("plain")
    return hw.measure(hw.find_heads(model), tensors(), score=spread, score_name="spread")


def test_a_report_comes_back_from_its_file(tmp_path):
    report = measured()
    report.save(tmp_path / "report.json")
    assert hw.report.load_report(tmp_path / "report.json") == report
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    text = (tmp_path / "report.json").read_text()
    for damage in (text[:-30], "[]", text.replace('"layers"', '"layer"'), text.replace('"low"', '"lowest"')):
        (tmp_path / "damaged.json").write_text(damage)
        with pytest.raises(DataError, match=r"damaged\.json"):
            hw.report.load_report(tmp_path / "damaged.json")
    record = {**json.loads(text), "roles": ["window"]}
    for one in record["layers"]:
        one |= {"heads": 3.0, "roles": [[0.5, 0.25, 0.125]], "chance": [0.2]}
    (tmp_path / "roles.json").write_text(json.dumps(record))
    assert hw.report.load_report(tmp_path / "roles.json").head_table().row_count == 9
    for keys, wrong in (
        (("layers", 1, "heads"), "three"),
        (("layers", 1, "heads"), 2),
        (("layers", 1, "pairs", "output_cka", 2), [0.5, 1.0]),
        (("layers", 1, "pairs", "output_cka", 2), [0.5, 0.5, "one"]),
        (("layers", 1, "entropy"), [1.0, 2.0]),
        (("layers", 1, "drops", 0, "value"), "large"),
        (("layers", 1, "drops"), record["layers"][1]["drops"][:1]),
        (("layers", 1, "roles"), [[0.5, 0.5]]),
        (("layers", 1, "chance"), []),
        (("roles",), []),
        (("layers", 1, "effective_heads"), "many"),
        (("whole", "value"), "high"),
        (("notes",), 4),
    ):
        changed = copy.deepcopy(record)
        *path, last = keys
        place = changed
        for key in path:
            place = place[key]
        place[last] = wrong
        (tmp_path / "damaged.json").write_text(json.dumps(changed))
        with pytest.raises(DataError, match=r"damaged\.json is a damaged report .*; measure again"):
            hw.report.load_report(tmp_path / "damaged.json")
    with pytest.raises(DataError, match="cannot be read"):
        hw.report.load_report(tmp_path / "absent.json")
    assert json.loads(text)["score"] == "spread"


def test_two_reports_stand_beside_one_another_only_if_their_models_have_one_shape():
    before, model = measured(), Stack("plain")
    after = hw.measure(hw.find_heads(model), tensors(), score=spread)
    shown = str(after.compare(before))
    change = after.layers[1].mean("output_cosine") - before.layers[1].mean("output_cosine")
    assert f"{change:+.3f}".replace("-", "\N{MINUS SIGN}") in shown
    weighted = after.layers[1].effective_heads_weighted - before.layers[1].effective_heads_weighted
    assert f"{weighted:+.3f}".replace("-", "\N{MINUS SIGN}") in shown
    other = Stack("plain", layers=2)
    with pytest.raises(SettingError, match="3 and 2 modules"):
        hw.measure(hw.find_heads(other), tensors()).compare(before)


def test_effective_heads_come_first_then_what_no_trick_fools_then_the_papers_measures():
    header, _ = make_layer_rows(measured().layers, everything=True)
    assert make_layer_rows(measured().layers)[0] == header[:7]
    order = ["effective heads", "CKA", "by variance", "attention JS", "output CKA", "output cosine"]
    assert [name for name in header if name in order] == order
    header, _ = make_comparison_rows(measured().layers, measured().layers)
    order = ["effective heads", "by variance", "CKA", "attention JS", "output cosine"]
    assert [name for name in header if name in order] == order


def test_the_tables_hold_the_numbers(capsys):
    from rich.console import Console

    report = measured()
    assert f"{report.layers[2].mean('contribution_cka'):.3f}" in str(report)
    console = Console(width=80)
    console.print(report)
    console.print(report.layer_table())
    console.print(report.head_table())
    shown = capsys.readouterr().out
    assert f"{report.layers[0].entropy[1]:.3f}" in shown
    assert f"{report.layers[2].mean('output_cka'):.3f}" in shown
    assert "CKA: how alike the contributions of two heads are" in shown
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown.split("95 %")[0]
    assert report.summary.startswith("Stack: 9 heads in 3 attention modules, 27 tokens; spread ")


def test_a_long_name_is_broken_between_words():
    console = Console(width=60)
    with console.capture() as capture:
        console.print(
            make_rich_table(["way", "score"], [["averaged as they are, neighbors, W_O refitted " * 2, "0.5"]], title="")
        )
    assert "\N{HORIZONTAL ELLIPSIS}" not in capture.get()
    assert capture.get().count("refitted") == 2


def test_progress_is_told_to_the_end():
    seen: list[tuple[int, int]] = []
    model = Stack("plain")
    hw.measure(hw.find_heads(model), tensors(), score=spread, advance=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (20, 20)  # two batches, each once whole, which is read, and once without each of nine heads
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_what_cannot_be_measured_is_refused():
    heads = hw.find_heads(Stack("plain"))
    with pytest.raises(SettingError, match="no batch"):
        hw.measure(heads, [])
    with pytest.raises(SettingError, match="a batch is a tuple"):
        hw.measure(heads, [(1, 2)])
    with pytest.raises(ShapeError, match="score returned float; expected a tensor with one number per item"):
        hw.measure(heads, tensors(), score=lambda output, _: float(output.mean()))
    with pytest.raises(ShapeError, match="score returned nan"):
        hw.measure(heads, tensors(), score=lambda output, _: output[:, 0, 0] * float("nan"))
    with pytest.raises(NotFired, match="were not called"):
        hw.measure(heads, tensors(), forward=lambda _model, batch: batch)
    assert heads.model.training


def test_a_guided_model_is_measured_with_the_masks_of_its_batches():
    model = BertModel(BertConfig(num_hidden_layers=3, **SMALL)).eval()
    heads = hw.find_heads(model)
    batches = [
        {**batch, "role_mask": hw.roles.Roles(hw.roles.Window(3))(tables, num_heads=4)}
        for batch, size in zip(ids(), (7, 5), strict=True)
        for tables in [[hw.roles.WordTable([f"w{place}" for place in range(size)])] * len(batch["input_ids"])]
    ]

    def measured(*, replay: bool) -> hw.report.Report:
        return hw.measure(heads, batches, score=lambda out, _: out[0][:, 0].sum(-1), replay=replay)

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
        hw.measure(hw.find_heads(model), tensors())


def test_drops_of_two_scores_do_not_stand_beside_one_another():
    model = Stack("plain").eval()
    heads = hw.find_heads(model)
    one, same, other = (hw.measure(heads, tensors(), score=spread, score_name=name) for name in ("a", "a", "b"))
    assert "mean drop" in str(one.compare(same))
    assert "mean drop" not in str(one.compare(other))


def test_one_token_has_no_cka_and_the_note_says_so():
    model = Stack("plain").eval()
    report = hw.measure(hw.find_heads(model), [torch.randn(1, 1, 12)])
    assert "output_cka" not in report.layers[0].pairs
    assert any("CKA was omitted: it needs at least two tokens" in note for note in report.notes)


@cases("tokens", [3, 4])
def test_too_few_tokens_have_no_effective_heads_and_the_note_says_so(tokens: int):
    model = Stack("plain").eval()
    report = hw.measure(hw.find_heads(model), [torch.randn(1, tokens, 12)])
    told = "effective heads and CKA were omitted: they need at least 4 tokens." in report.notes
    assert told is (report.layers[0].effective_heads is None) is (tokens < 4)


def test_spans_are_the_mean_squared_cosine_of_principal_angles():
    torch.manual_seed(4)
    layer = nn.MultiheadAttention(12, 3, batch_first=True).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    report = hw.measure(hw.find_heads(layer), [{"query": x, "key": x, "value": x, "need_weights": False}])
    rows = dict(zip(("query", "key", "value"), layer.in_proj_weight.detach().chunk(3), strict=True))
    columns = {name: weight.unflatten(0, (3, 4)).mT for name, weight in rows.items()}
    columns["output"] = layer.out_proj.weight.detach().unflatten(1, (3, 4)).transpose(0, 1)
    for name, heads in columns.items():
        bases = [torch.linalg.qr(head)[0] for head in heads]
        for i in range(3):
            for j in range(3):
                cosines = torch.linalg.svdvals(bases[i].mT @ bases[j])
                assert report.layers[0].pairs[f"{name}_span"][i][j] == pytest.approx(float(cosines.square().mean()))


def test_what_a_report_calls_an_attention_names_it_to_prune(tmp_path):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 4, 16, batch_first=True), 2, enable_nested_tensor=False)
    x = torch.randn(4, 5, 8)
    written = hw.measure(hw.find_heads(model), [x], score=lambda output, _: output[..., 0].mean(1))
    written.save(tmp_path / "report.json")
    report = hw.report.load_report(tmp_path / "report.json")
    assert report == written
    names = [layer.site.name for layer in report.layers]
    assert names == [site.name for site in hw.find_heads(model)]
    pruning = hw.prune(
        hw.find_heads(model), keep=0.75, importance={layer.site.name: layer.drops for layer in report.layers}
    )
    least = [min(range(4), key=lambda head: layer.drops[head].value) for layer in report.layers]
    assert pruning.removed == {name: (head,) for name, head in zip(names, least, strict=True)}
    first, second = hw.find_heads(model).sites
    assert hw.prune(hw.find_heads(model).where(first.name), {report.layers[0].site: [0]}).removed == {names[0]: (0,)}
    again = hw.find_heads(model)
    assert hw.prune(again, {again.sites[1]: [1]}).removed == {second.name: (1,)}


def test_a_model_that_is_an_attention_itself_is_named_to_prune_as_tables_and_importance_name_it():
    for name in ("", "(model)"):
        heads = hw.find_heads(nn.MultiheadAttention(8, 4, batch_first=True))
        assert "(model): heads 1 removed, 3 left" in str(hw.prune(heads, {name: [1]}))


def test_the_headline_names_the_layer_with_the_smallest_share_and_counts_heads_on_the_first_token():
    layers = (
        LayerReport("one", "self", "", 0, 4, effective_heads=3.5, first=(0.4, 0.6, 0.2, 0.51)),
        LayerReport("two", "self", "", 1, 2, effective_heads=1.2, first=(0.1, 0.9)),
    )
    report = hw.report.Report("Model", 1, 2000, layers)
    assert report.headline == (
        "Layer 1 is the most redundant: 1.2 of 2 effective heads; 3 of 6 heads mostly read the first token."
    )
    assert "with only 999 tokens this may be chance" in replace(report, tokens=999).headline


def test_the_first_token_is_the_first_that_is_no_padding():
    heads = hw.find_heads(nn.MultiheadAttention(8, 2, batch_first=True))
    keep = torch.tensor([[False, False, True, True, True]])
    x = torch.randn(1, 5, 8)
    with hw.Taps(heads, weights=True) as taps:
        heads.model(x, x, x, key_padding_mask=~keep)
        capture = replace(taps.read()[0], query_keep=keep, key_keep=keep)
    assert torch.allclose(_read_first(capture.weights, capture), capture.weights[0, :, 2:, 2].sum(-1).double())
