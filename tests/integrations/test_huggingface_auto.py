"""What `import headwise` registers in transformers: its Auto classes, pipelines and peft open saved folders."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import headwise as hw
from cases import cases
from headwise.errors import DataError, SettingError
from headwise.integrations.auto import register

SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
# The Auto class of each model, and what the model is given.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertModel": ("AutoModel", SIZES),
    "BertForMaskedLM": ("AutoModelForMaskedLM", SIZES),
    "BertForSequenceClassification": ("AutoModelForSequenceClassification", {**SIZES, "num_labels": 3}),
    "LlamaForCausalLM": ("AutoModelForCausalLM", SIZES),
    "GPT2LMHeadModel": ("AutoModelForCausalLM", {"n_embd": 16, "n_layer": 2, "n_head": 4}),
    "T5ForConditionalGeneration": (
        "AutoModelForSeq2SeqLM",
        {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4},
    ),
}
TOKENS = torch.arange(3, 11).view(2, 4)


def build(name: str) -> Any:
    """A model with fewer heads in its first layer, and aggregators of trained weights."""
    torch.manual_seed(3)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(vocab_size=30, **KINDS[name][1])).eval()
    heads = hw.find_heads(model)
    hw.prune(heads, {site.name: [1] for site in heads if site.kind == "self" and (site.layer == 0 or name[0] == "T")})
    hw.aggregate(
        hw.find_heads(model).kind(hw.find_heads(model).sites[0].kind).layers(1),
        hw.routing.Residual(hw.routing.EMRouting(iterations=2, votes=hw.routing.PerHead())),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def compute(model: Any) -> torch.Tensor:
    given = {"decoder_input_ids": TOKENS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=TOKENS, **given)[0]


def add_tokenizer(folder: Path, kind: Any = transformers.PreTrainedTokenizerFast) -> None:
    words = {"[UNK]": 0, "[PAD]": 1, **{word: number for number, word in enumerate("abcdefghijklm", start=3)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    kind(tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]", eos_token="[PAD]").save_pretrained(folder)


@cases("name", KINDS)
def test_the_auto_class_of_a_model_opens_its_folder_and_saves_it_again(name: str, tmp_path: Path):
    model, auto = build(name), getattr(transformers, KINDS[name][0])
    model.save_pretrained(tmp_path / "saved")
    before = torch.get_rng_state()
    again, told = auto.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert type(again) is type(model)
    assert not again.training
    assert type(again.config) is type(model.config)
    assert torch.equal(compute(again), compute(model))
    assert not any(told.values())
    assert again.name_or_path == str(tmp_path / "saved")
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(compute(hw.load(tmp_path / "again")), compute(model))
    base = transformers.AutoModel.from_pretrained(tmp_path / "saved")
    assert type(base) is type(model.base_model)
    assert torch.equal(compute(base), compute(model.base_model))
    base.save_pretrained(tmp_path / "base")
    assert torch.equal(compute(hw.load(tmp_path / "base")), compute(base))


def test_a_configuration_is_that_of_the_stock_model(tmp_path: Path):
    build("BertForMaskedLM").save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path, output_attentions=True)
    assert isinstance(config, transformers.BertConfig)
    assert (config.model_type, config.hidden_size, config.output_attentions) == ("bert", 16, True)
    opened = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path, config=config, attn_implementation="eager")
    assert type(opened.config) is transformers.BertConfig
    assert opened(TOKENS).attentions[1].shape == (2, 4, 4, 4)
    # a stock model can be made of it, and one with its changes cannot
    assert type(transformers.AutoModel.from_config(transformers.BertConfig.from_dict(config.to_dict())))
    with pytest.raises(SettingError, match="does not say what was changed"):
        transformers.AutoModel.from_config(config)


def test_options_of_from_pretrained_act_or_are_refused(tmp_path: Path):
    build("BertForSequenceClassification").save_pretrained(tmp_path)
    auto = transformers.AutoModelForSequenceClassification
    for options in ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}):
        assert {one.dtype for one in auto.from_pretrained(tmp_path, **options).parameters()} == {torch.bfloat16}
    loaded = auto.from_pretrained(tmp_path, attn_implementation="eager", device_map={"": "cpu"}, dtype="auto")
    assert loaded.config._attn_implementation == "eager"
    assert auto.from_pretrained(tmp_path, device_map="auto").device.type in ("cpu", "cuda")
    with pytest.raises(DataError, match=r"classifier\.weight has shape \(3, 16\)"):
        auto.from_pretrained(tmp_path, num_labels=5)
    for options in ({"device_map": {"bert": "cpu", "classifier": 0}}, {"device_map": "balanced"}, {"variant": "fp16"}):
        with pytest.raises(SettingError, match="headwise"):
            auto.from_pretrained(tmp_path, **options)
    with pytest.raises(DataError, match=r"holds a BertForSequenceClassification, and AutoModelForMaskedLM opens"):
        transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        transformers.AutoModelForImageClassification.from_pretrained(tmp_path)


def test_a_repository_of_the_hub_is_fetched_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = build("BertModel")
    model.save_pretrained(tmp_path)
    asked: list[Any] = []

    def fetch(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    opener = transformers.AutoModel._model_mapping[type(config)]
    again = opener.from_pretrained("someone/bert", config=config, revision="1a2b", local_files_only=True)
    assert asked == [("someone/bert", {"revision": "1a2b", "local_files_only": True})]
    assert torch.equal(compute(again), compute(model))
    assert again.name_or_path == "someone/bert"


def test_a_module_that_is_not_of_transformers_is_refused_in_a_sentence(tmp_path: Path):
    encoder = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    hw.aggregate(hw.find_heads(encoder), hw.routing.SimpleRouting())
    hw.save(encoder, tmp_path)
    with pytest.raises(SettingError, match=r"not from transformers; use headwise\.load\(folder, model\)"):
        transformers.AutoModel.from_pretrained(tmp_path)
    # a tokenizer beside it needs no model
    add_tokenizer(tmp_path)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("a b")["input_ids"] == [3, 4]


@cases("kind", [transformers.PreTrainedTokenizerFast, transformers.BertTokenizer])
def test_pipelines_and_tokenizers_open_a_folder(kind: Any, tmp_path: Path):
    model = build("BertForMaskedLM")
    model.save_pretrained(tmp_path)
    add_tokenizer(tmp_path) if kind is not transformers.BertTokenizer else kind(
        vocab={"[UNK]": 0, "[PAD]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "a": 5, "b": 6}
    ).save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    pipe = transformers.pipeline("feature-extraction", model=str(tmp_path))
    assert type(pipe.tokenizer) is type(tokenizer)
    assert type(pipe.model) is transformers.BertModel
    with torch.no_grad():
        expected = model.bert(**tokenizer("a b", return_tensors="pt"))[0]
    assert torch.equal(torch.tensor(pipe("a b")), expected)


@pytest.mark.full
def test_a_folder_is_opened_by_sentence_transformers_and_exported(tmp_path: Path):
    library = pytest.importorskip("sentence_transformers")
    model = build("BertModel")
    model.save_pretrained(tmp_path)
    add_tokenizer(tmp_path)
    opened = library.SentenceTransformer(str(tmp_path), device="cpu")
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path)(["a b c", "d"], padding=True, return_tensors="pt")
    with torch.no_grad():
        states, kept = model(**tokens)[0], tokens["attention_mask"].unsqueeze(-1)
    expected = (states * kept).sum(1) / kept.sum(1)
    torch.testing.assert_close(opened.encode(["a b c", "d"], convert_to_tensor=True), expected)
    exported = torch.export.export(transformers.AutoModel.from_pretrained(tmp_path), (), dict(tokens)).module()
    torch.testing.assert_close(exported(**tokens)[0], states)


def test_the_calls_of_evaluation_harnesses_open_a_folder(tmp_path: Path):
    # as HFLM of lm-eval loads a model: the configuration first, which then chooses the Auto class
    model = build("LlamaForCausalLM")
    model.save_pretrained(tmp_path)
    add_tokenizer(tmp_path)
    config = transformers.AutoConfig.from_pretrained(str(tmp_path), revision="main", trust_remote_code=False)
    assert config.model_type in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    options: Any = {"revision": "main", "dtype": "auto", "trust_remote_code": False, "device_map": {"": "cpu"}}
    again = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path), **options)
    assert torch.equal(compute(again), compute(model))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path), revision="main", use_fast=True)
    assert tokenizer("a b")["input_ids"] == [3, 4]


def test_a_pipeline_generates(tmp_path: Path):
    model = build("LlamaForCausalLM")
    model.save_pretrained(tmp_path)
    add_tokenizer(tmp_path)
    pipe = transformers.pipeline("text-generation", model=str(tmp_path))
    given = pipe.tokenizer("a b c", return_tensors="pt")
    expected = model.generate(given["input_ids"], max_new_tokens=4, do_sample=False)
    options = {"max_new_tokens": 4, "do_sample": False, "return_tensors": True}
    assert pipe("a b c", **options)[0]["generated_token_ids"] == expected[0].tolist()


def test_an_adapter_of_peft_is_put_on_an_opened_model_and_finds_it_by_its_name(tmp_path: Path):
    peft = pytest.importorskip("peft")
    build("BertForSequenceClassification").save_pretrained(tmp_path / "base")
    auto = transformers.AutoModelForSequenceClassification
    settings = peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False, task_type="SEQ_CLS")
    adapted = peft.get_peft_model(auto.from_pretrained(tmp_path / "base"), settings).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(auto.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    found = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter")
    assert torch.equal(compute(loaded.eval()), compute(adapted))
    assert torch.equal(compute(found.eval()), compute(adapted))


IMPORTS = [
    "import headwise, transformers",
    "import transformers, headwise",
    "from transformers import AutoModel\nimport headwise",
]


@pytest.mark.slow
@cases("statement", IMPORTS)
def test_a_new_process_opens_a_folder_whatever_the_order_of_its_imports(statement: str, tmp_path: Path):
    build("BertModel").save_pretrained(tmp_path)
    code = f"{statement}\nimport sys, transformers\nprint(transformers.AutoConfig.for_model('headwise').model_type)\n"
    # neither package has loaded torch for it
    code += "print('headwise.routing' in sys.modules)\n"
    code += f"print(type(transformers.AutoModel.from_pretrained({str(tmp_path)!r})).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["headwise", "False", "BertModel"]


def test_registering_again_changes_nothing_and_an_unknown_version_of_transformers_is_left_alone(tmp_path: Path):
    register()
    register()
    assert transformers.AutoConfig.for_model("headwise").model_type == "headwise"
    known = tmp_path / "transformers" / "models" / "auto"
    known.mkdir(parents=True)
    for folder in (known, *list(known.parents)[:2]):
        (folder / "__init__.py").touch()
    (known / "configuration_auto.py").write_text("CONFIG_MAPPING = {}\n")
    code = "import sys; sys.path.insert(0, sys.argv[1]); import headwise, transformers.models.auto.configuration_auto"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
