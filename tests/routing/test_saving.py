"""A model with aggregators comes back from its folder as it was, and nothing else takes that folder for a model."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import headwise as hw
from cases import cases
from heads.families import BY_NAME, FAMILIES, sweep
from heads.family import Family
from heads.forwards import results, same
from headwise.atomic import seal
from headwise.errors import HeadwiseError

# the test model of Chameleon lacks the tokenizer of images, which its config builds
OTHERS = ("timm", "torch", "Chameleon")
TRANSFORMERS = [family for family in FAMILIES if not family.name.startswith(OTHERS) and family.replaceable]


def swapped(family: Family) -> tuple[nn.Module, hw.Heads]:
    """Different aggregations in one model, with weights of a training rather than of a start."""
    model = family.build()
    heads = hw.find_heads(model)
    settings = (
        hw.routing.EMRouting(iterations=2, capsules=4, inverse_temperature=(0.7, 2.5)),
        hw.routing.Residual(hw.routing.SimpleRouting(votes=hw.routing.SharedTrunk(relu=False))),
        hw.routing.Trunk(votes=hw.routing.PerHead()),
    )
    for index, site in enumerate(heads.sites):
        hw.aggregate(hw.Heads(model, (site,), heads.projections, heads.found), settings[index % 3])
    with torch.no_grad():
        generator = torch.Generator().manual_seed(4)
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model, heads


@sweep(TRANSFORMERS)
def test_a_saved_model_comes_back_with_the_same_outputs_to_the_bit(family: Family, tmp_path: Path):
    model, heads = swapped(family)
    inputs = family.inputs(padded=family.maskable)
    expected = results(model, inputs)
    model.save_pretrained(tmp_path)
    before = torch.get_rng_state()
    again = hw.load(tmp_path)
    assert torch.equal(before, torch.get_rng_state())
    assert type(again) is type(model)
    assert not again.training
    assert same(expected, results(again, inputs))
    found = hw.find_heads(again)
    assert [type(site.output_projection.module) for site in found] == [
        type(site.output_projection.module) for site in heads
    ]
    assert again.state_dict().keys() == model.state_dict().keys()


REFUSED = """
import sys, transformers
for folder in sys.argv[1:]:
    kind = getattr(transformers, folder.rpartition("/")[2])
    config = kind.config_class()
    for way in (
        lambda: transformers.AutoModel.from_pretrained(folder),
        lambda: transformers.AutoConfig.from_pretrained(folder),
        lambda: transformers.pipeline("feature-extraction", model=folder),
        lambda: kind.from_pretrained(folder),
        lambda: kind.from_pretrained(folder, config=config),
        lambda: kind.from_pretrained(folder, use_safetensors=False),
        lambda: kind.from_pretrained(folder, config=config, ignore_mismatched_sizes=True),
    ):
        try:
            way()
        except (OSError, ValueError) as error:
            print("headwise" in str(error))
assert "headwise" not in sys.modules
"""


@pytest.mark.full
def test_transformers_without_headwise_refuses_the_folder_in_every_way_of_loading(tmp_path: Path):
    for name in ("BERT", "GPT-2", "T5"):
        model, _ = swapped(BY_NAME[name])
        model.save_pretrained(tmp_path / type(model).__name__)
    folders = [str(folder) for folder in sorted(tmp_path.iterdir())]
    done = subprocess.run([sys.executable, "-c", REFUSED, *folders], capture_output=True, text=True, check=True)
    # the classes that look for a config of any name first do not get to read what the folder is
    assert done.stdout.split() == [*["True"] * 3, *["False"] * 4] * 3


def test_a_model_without_aggregators_is_saved_as_ever(tmp_path: Path):
    import transformers

    family = BY_NAME["BERT"]
    model = family.build()
    heads = hw.find_heads(model)
    plain = results(model, family.inputs())
    assert "save_pretrained" not in vars(model)
    aggregation = hw.aggregate(heads, hw.routing.Trunk())
    assert "save_pretrained" in vars(model)
    aggregation.remove()
    assert "save_pretrained" not in vars(model)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path)
    assert same(plain, results(again.eval(), family.inputs()))
    with pytest.raises(hw.errors.DataError, match=r"holds no headwise\.json.*from_pretrained"):
        hw.load(tmp_path)
    with pytest.raises(hw.errors.SettingError, match="model is a Heads; expected the torch module"):
        hw.save(heads, tmp_path)
    with pytest.raises(hw.errors.DataError, match="BertModel holds no aggregator"):
        hw.save(model, tmp_path)


def test_of_two_aggregations_the_second_keeps_the_folder_when_the_first_is_removed(tmp_path: Path):
    family = BY_NAME["BERT"]
    model = family.build()
    heads = hw.find_heads(model)
    first, _ = (
        hw.aggregate(heads.layer(0), hw.routing.Trunk()),
        hw.aggregate(heads.layer(1), hw.routing.SimpleRouting()),
    )
    first.remove()
    model.save_pretrained(tmp_path)
    again = hw.load(tmp_path)
    assert same(results(model, family.inputs()), results(again, family.inputs()))


def test_a_copy_and_a_pickle_save_themselves(tmp_path: Path):
    family = BY_NAME["BERT"]
    model, _ = swapped(family)
    for index, twin in enumerate((copy.deepcopy(model), pickle.loads(pickle.dumps(model)))):
        with torch.no_grad():
            twin.get_parameter("encoder.layer.1.output.dense.weight").mul_(2)
        twin.save_pretrained(tmp_path / str(index))
        again = hw.load(tmp_path / str(index))
        assert same(results(twin, family.inputs()), results(again, family.inputs()))
        assert not same(results(model, family.inputs()), results(again, family.inputs()))


def test_a_model_inside_the_model_saves_its_own_aggregators(tmp_path: Path):
    import transformers

    family = BY_NAME["BERT"]
    model = transformers.BertForSequenceClassification(family.build().config).eval()
    hw.aggregate(hw.find_heads(model), hw.routing.SimpleRouting())
    inputs = family.inputs()
    model.save_pretrained(tmp_path / "whole")
    model.bert.save_pretrained(tmp_path / "part")
    assert same(results(model, inputs), results(hw.load(tmp_path / "whole"), inputs))
    part = hw.load(tmp_path / "part")
    assert type(part) is transformers.BertModel
    assert same(results(model.bert, inputs), results(part, inputs))


def test_shards_hold_the_same_as_one_file(tmp_path: Path):
    family = BY_NAME["Llama"]
    model, _ = swapped(family)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    files = sorted(tmp_path.glob("headwise-*.safetensors"))
    assert len(files) > 3
    assert same(results(model, family.inputs()), results(hw.load(tmp_path), family.inputs()))
    files[1].unlink()
    with pytest.raises(hw.errors.DataError, match=r"is missing: the folder was copied or saved incompletely"):
        hw.load(tmp_path)
    with pytest.raises(hw.errors.SettingError, match="max_shard_size is '5 barrels'"):
        model.save_pretrained(tmp_path, max_shard_size="5 barrels")


def test_tied_weights_stay_tied_and_are_written_once(tmp_path: Path):
    family = BY_NAME["GPT-2"]
    model, heads = swapped(family)
    assert model.lm_head.weight is model.transformer.wte.weight
    # and a tie of the user's own, between two aggregators
    second = copy.deepcopy(heads.sites[0].output_projection.module)
    second.beta_a = heads.sites[0].output_projection.module.beta_a
    setattr(heads.sites[1].output_projection.owner, heads.sites[1].output_projection.attribute, second)
    model.save_pretrained(tmp_path)
    again = hw.load(tmp_path)
    assert again.lm_head.weight is again.transformer.wte.weight
    found = hw.find_heads(again).sites
    assert found[0].output_projection.module.beta_a is found[1].output_projection.module.beta_a
    assert same(results(model, family.inputs()), results(again, family.inputs()))
    written = sum(path.stat().st_size for path in tmp_path.glob("headwise-*.safetensors"))
    assert written < sum(p.numel() * 4 for p in model.state_dict().values()) + 40_000


@cases("dtype", [torch.bfloat16, torch.float64])
def test_dtype_attention_implementation_and_generation_are_kept(dtype: torch.dtype, tmp_path: Path):
    family = BY_NAME["Llama"]
    model, heads = swapped(family)
    model = model.to(dtype)
    model.set_attn_implementation("eager")
    model.generation_config.max_new_tokens = 5
    taps = hw.Taps(heads, weights=True)
    # ours, while somebody listens, is nobody else's
    model.save_pretrained(tmp_path)
    taps.remove()
    again = hw.load(tmp_path)
    assert {p.dtype for p in again.parameters()} == {dtype}
    assert again.config._attn_implementation == "eager"
    assert same(results(model, family.inputs()), results(again, family.inputs()))
    ids = family.inputs()["input_ids"]
    assert torch.equal(model.generate(ids, do_sample=False), again.generate(ids, do_sample=False))


def test_a_second_save_replaces_the_first_and_a_broken_one_leaves_it(tmp_path: Path, monkeypatch):
    family = BY_NAME["BERT"]
    model, _ = swapped(family)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    first = results(model, family.inputs())
    with torch.no_grad():
        model.get_parameter("encoder.layer.0.output.dense.weight").mul_(2)
    written = safetensors.torch.save_file
    done = []

    def full_disk(tensors: dict, path: Path, **options: dict) -> None:
        if len(done) == 1:
            raise OSError("no space left")
        done.append(path)
        written(tensors, path, **options)

    monkeypatch.setattr(safetensors.torch, "save_file", full_disk)
    with pytest.raises(hw.errors.DataError, match="no space left"):
        model.save_pretrained(tmp_path, max_shard_size="30KB")
    monkeypatch.undo()
    assert same(first, results(hw.load(tmp_path), family.inputs()))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    model.save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("headwise-*.safetensors"))) == 1
    assert same(results(model, family.inputs()), results(hw.load(tmp_path), family.inputs()))


def test_a_folder_with_a_stock_model_is_not_mixed(tmp_path: Path):
    model = BY_NAME["BERT"].build()
    model.save_pretrained(tmp_path)
    files = sorted(path.name for path in tmp_path.iterdir())
    hw.aggregate(hw.find_heads(model), hw.routing.Trunk())
    with pytest.raises(hw.errors.DataError, match=r"holds model\.safetensors.*use another folder"):
        model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == files


def test_options_without_a_form_are_refused_and_other_processes_write_nothing(tmp_path: Path):
    model, _ = swapped(BY_NAME["BERT"])
    with pytest.raises(hw.errors.SettingError, match=r"was given \{'variant': 'fp16'\}"):
        model.save_pretrained(tmp_path, variant="fp16")
    model.save_pretrained(tmp_path / "other", is_main_process=False, push_to_hub=False)
    assert not (tmp_path / "other").exists()


def test_any_module_is_restored_into_one_like_it(tmp_path: Path):
    def make() -> nn.Module:
        torch.manual_seed(1)
        return nn.Transformer(16, 4, 1, 1, 24, batch_first=True).eval()

    model = make()
    inputs = {"src": torch.randn(2, 5, 16), "tgt": torch.randn(2, 3, 16)}
    hw.aggregate(hw.find_heads(model), hw.routing.EMRouting())
    hw.save(model, tmp_path)
    again = hw.load(tmp_path, make())
    assert same(results(model, inputs), results(again, inputs))
    with pytest.raises(hw.errors.DataError, match=r"build one like it.*load\(folder, model\)"):
        hw.load(tmp_path)
    parameters = list(again.parameters())
    with torch.no_grad():
        parameters[-1].add_(1.0)
    # a model that has the same aggregators is restored in place: an optimizer still holds its parameters
    assert hw.load(tmp_path, again) is again
    assert all(before is after for before, after in zip(parameters, again.parameters(), strict=True))
    assert same(results(model, inputs), results(again, inputs))
    other = make()
    hw.aggregate(hw.find_heads(other), hw.routing.EMRouting(iterations=2))
    with pytest.raises(hw.errors.DataError, match=r"is a EMAggregator already, with .*iterations.*; the saved one has"):
        hw.load(tmp_path, other)
    with pytest.raises(hw.errors.DataError, match=r"has shape \(.*\) in .* and \(.*\) in the model"):
        hw.load(tmp_path, nn.Transformer(16, 4, 1, 1, 48, batch_first=True))
    with pytest.raises(hw.errors.DataError, match="does not fit Transformer"):
        hw.load(tmp_path, nn.Transformer(16, 4, 2, 1, 24, batch_first=True))


@dataclass(frozen=True)
class Own:
    """Votes of a user's own: one matrix a head."""

    scale: float = 1.0

    def weights(self, num_heads: int, head_size: int, width: int) -> dict:
        from headwise.routing.algorithms import VoteWeight

        return {"own_weight": VoteWeight((num_heads, width, head_size), bound=0.5)}

    def compute(self, heads: Tensor, num_heads: int, *weights: Tensor) -> Tensor:
        by_head = heads.unflatten(-1, (num_heads, -1)).transpose(0, 1)
        return (by_head @ weights[0].mT).transpose(0, 1) * self.scale


@dataclass(frozen=True)
class Tagged(Own):
    """Fields with names that the record uses itself, and one that the class computes."""

    setting: float | hw.routing.SharedTrunk = 1.0
    setting_: str = "own"
    setting__: tuple[float, ...] = ()
    num_heads: int = 3
    doubled: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", 2.0 * self.scale)


@cases(
    "own",
    [Own(scale=0.5), Tagged(0.5, 3.0, "this", (1.0, 2.0), 7), Tagged(0.25, hw.routing.SharedTrunk(), num_heads=1)],
)
def test_a_setting_of_the_users_own_comes_back_when_its_class_is_given(own: Own, tmp_path: Path):
    family = BY_NAME["BERT"]
    model = family.build()
    hw.aggregate(hw.find_heads(model), hw.routing.SimpleRouting(votes=own))
    model.save_pretrained(tmp_path)
    with pytest.raises(hw.errors.DataError, match=rf"holds the setting '{type(own).__name__}'.*pass its class"):
        hw.load(tmp_path)
    again = hw.load(tmp_path, settings=(Own, Tagged))
    assert same(results(model, family.inputs()), results(again, family.inputs()))
    imposter = type("Trunk", (Own,), {"__module__": __name__})
    other = family.build()
    hw.aggregate(hw.find_heads(other), hw.routing.SimpleRouting(votes=imposter()))
    with pytest.raises(hw.errors.DataError, match=r"Trunk is not headwise's Trunk.*rename it"):
        other.save_pretrained(tmp_path)
    found = (getattr(module, "setting", None) for module in again.modules())
    assert {setting.votes for setting in found if isinstance(setting, hw.routing.SimpleRouting)} == {own}


def test_a_folder_of_another_making_is_refused(tmp_path: Path):
    model, _ = swapped(BY_NAME["BERT"])
    model.save_pretrained(tmp_path)
    record = tmp_path / "headwise.json"
    written = json.loads(record.read_text())
    for number, message in (
        (1, r"has format 1; expected 2: benchmarks/convert_saved\.py"),
        (3, "needs a newer headwise"),
    ):
        record.write_text(json.dumps(seal({**written, "format": number}, tmp_path, written["file_digests"])))
        with pytest.raises(hw.errors.DataError, match=message):
            hw.load(tmp_path)
    record.write_text("[]")
    with pytest.raises(hw.errors.DataError, match="is not a record of headwise"):
        hw.load(tmp_path)


def test_without_safetensors_a_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, _ = swapped(BY_NAME["BERT"])
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(HeadwiseError, match="pip install safetensors"):
        model.save_pretrained(tmp_path / "saved")
    assert not [*tmp_path.iterdir()]


def test_a_dtype_that_safetensors_does_not_have_is_named(tmp_path: Path):
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    hw.aggregate(hw.find_heads(model), hw.routing.SimpleRouting())
    model.register_buffer("turns", torch.ones(2, dtype=torch.complex128))
    with pytest.raises(
        hw.errors.DataError, match=r"turns has dtype torch\.complex128, which safetensors does not store"
    ):
        hw.save(model, tmp_path / "saved")
    model.turns = model.turns.to(torch.complex64)
    hw.save(model, tmp_path / "saved")
    assert torch.equal(hw.load(tmp_path / "saved", copy.deepcopy(model)).turns, model.turns)
    assert len([*tmp_path.iterdir()]) == 1


def flatten(setting: Any) -> Any:
    """A setting as format 1 had it: its fields beside the name of its class."""
    if isinstance(setting, dict):
        return {"setting": setting["setting"], **{name: flatten(value) for name, value in setting["fields"].items()}}
    return setting


@pytest.mark.full
def test_a_folder_of_format_1_is_converted_to_the_bit(tmp_path: Path):
    model, _ = swapped(BY_NAME["GPT-2"])
    model.save_pretrained(tmp_path / "now")
    record, config = (json.loads((tmp_path / "now" / name).read_text()) for name in ("headwise.json", "config.json"))
    tensors = safetensors.torch.load_file(tmp_path / "now" / record["weights"])
    old = tmp_path / "old"
    old.mkdir()
    torch.save(tensors, old / "headwise-1a2b-00001-of-00001.pt")
    (old / "config.json").write_text("{}")
    aggregators = {surgery["module"]: surgery for surgery in record["surgeries"]}
    written = {
        "format": 1,
        "model": {name: config[name] for name in ("class", "config", "attention", "generation")},
        "aggregators": {
            name: {**{key: one[key] for key in ("num_heads", "head_size", "width")}, "setting": flatten(one["setting"])}
            for name, one in aggregators.items()
        },
        "adopted": [],
        "sizes": {},
        "tied": record["tied"],
        "files": {"headwise-1a2b-00001-of-00001.pt": [*tensors]},
    }
    (old / "headwise.json").write_text(json.dumps(seal(written, old, ["config.json", *written["files"]])))
    with pytest.raises(hw.errors.DataError, match=r"has format 1; expected 2: benchmarks/convert_saved\.py"):
        hw.load(old)
    script = Path(__file__).parents[2] / "benchmarks" / "convert_saved.py"
    subprocess.run([sys.executable, script, old, tmp_path / "new"], check=True, capture_output=True)
    assert json.loads((tmp_path / "new" / "headwise.json").read_text())["surgeries"] == record["surgeries"]
    assert same(
        results(model, BY_NAME["GPT-2"].inputs()), results(hw.load(tmp_path / "new"), BY_NAME["GPT-2"].inputs())
    )
    # a changed file is not converted
    (old / "config.json").write_text("{ }")
    done = subprocess.run(
        [sys.executable, script, old, tmp_path / "other"], check=False, capture_output=True, text=True
    )
    assert "config.json was changed since it was written" in done.stderr
    assert not (tmp_path / "other").exists()


# Given tensors


def test_averaged_weights_are_written_under_the_models_names_and_refused_under_others(tmp_path: Path):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    hw.aggregate(hw.find_heads(encoder), hw.routing.SimpleRouting())
    averaged = torch.optim.swa_utils.AveragedModel(encoder)
    with torch.no_grad():
        averaged.update_parameters(encoder)
        for parameter in encoder.parameters():
            parameter.add_(0.5)
    with pytest.raises(hw.errors.DataError, match=r"not in the model; .*strip a prefix such as 'module\.'"):
        hw.save(encoder, tmp_path / "averaged", state_dict=averaged.state_dict())
    assert not (tmp_path / "averaged").exists()
    hw.save(encoder, tmp_path / "averaged", state_dict=averaged.module.state_dict())
    again = hw.load(tmp_path / "averaged", copy.deepcopy(encoder))
    for one, own, mean in zip(again.parameters(), encoder.parameters(), averaged.module.parameters(), strict=True):
        assert torch.equal(one, mean)
        assert not torch.equal(one, own)


class WithBuffers(nn.Module):
    """An attention beside a tied weight, a buffer that no state dict holds, and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.one.weight
        self.register_buffer("places", torch.arange(3.0), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def test_a_given_state_dict_has_every_tensor_of_the_model_and_no_other(tmp_path: Path):
    model = WithBuffers()
    hw.aggregate(hw.find_heads(model), hw.routing.Trunk())
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "one.weight"}
    doubled = {name: 2 * tensor if isinstance(tensor, Tensor) else tensor for name, tensor in state.items()}
    hw.save(model, tmp_path, state_dict=doubled)
    again = hw.load(tmp_path, copy.deepcopy(model))
    assert torch.equal(again.get_parameter("one.weight"), 2 * model.one.weight)
    assert torch.equal(again.get_buffer("places"), model.get_buffer("places"))
    first = "layer.linear1.weight"
    for wrong, message in (
        ({}, r"fit WithBuffers: \[.*\] \(\d+\) are missing and \[\] \(0\)"),
        ({name: tensor for name, tensor in state.items() if name != first}, rf"\['{first}'\] \(1\) are missing"),
        ({**state, "bogus": torch.zeros(3)}, r"\['bogus'\] \(1\) are not in the model"),
        ({**state, first: torch.zeros(3)}, rf"{first} has shape \(3,\) in state_dict and \(16, 8\) in the model"),
    ):
        with pytest.raises(hw.errors.DataError, match=message):
            hw.save(model, tmp_path / "wrong", state_dict=wrong)
    assert not (tmp_path / "wrong").exists()
