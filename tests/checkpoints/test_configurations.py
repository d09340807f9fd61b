import json

import pytest

from onebasin.checkpoints.configurations import (
    check_differences,
    compare_configurations,
    compare_tokenizers,
    find_differences_of_folders,
    find_folder,
)
from tests.checkpoints.language_models import SMALL

GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **SMALL["GPT2LMHeadModel"]}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SMALL["LlamaForCausalLM"]}


def write(folder, content, name="config.json"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (GPT2, {"n_head": 8}, "n_head is 4 in {a} and 8 in {b}"),
        (GPT2, {"activation_function": "relu"}, 'activation_function is gelu_new in {a} and relu in {b}'),
        (GPT2, {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-05 in {a} and 1e-06 in {b}"),
        (LLAMA, {"rope_theta": 5e5}, "rope_parameters.rope_theta is 10000.0 in {a} and 500000.0 in {b}"),
        (LLAMA, {"hidden_act": "relu"}, "hidden_act is silu in {a} and relu in {b}"),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "a.b is 1 in {a} and 2 in {b}"),
        ({"x": 1}, {"y": "\x1b[31m"}, 'y is not set in {a} and "\\u001b[31m" in {b}'),
    ],
)  # fmt: skip
def test_differences_are_named_with_both_values(tmp_path, base, changes, words):
    if "model_type" in base:
        pytest.importorskip("transformers")
    a, b = write(tmp_path / "a", base), write(tmp_path / "b", {**base, **changes})
    assert words.format(a=a, b=b) in compare_configurations(a, b)


@pytest.mark.parametrize(
    "changes",
    [
        {"_name_or_path": "x", "transformers_version": "1", "use_cache": False, "task_specific_params": {"t": {"k": 1}}},
        {"torch_dtype": "bfloat16"},
        {"resid_pdrop": 0.3, "initializer_range": 1.0},
        {"scale_attn_weights": True},  # the default, written out
        {"architectures": None},
    ],
)
def test_what_has_no_effect_is_ignored(tmp_path, changes):
    pytest.importorskip("transformers")
    a, b = write(tmp_path / "a", GPT2), write(tmp_path / "b", {**GPT2, **changes})
    assert compare_configurations(a, b) == []


def test_the_order_of_architectures_is_ignored(tmp_path):
    a, b = (write(tmp_path / name, {"architectures": [*name]}) for name in ("xy", "yx"))
    assert compare_configurations(a, b) == []
    assert len(compare_configurations(a, write(tmp_path / "z", {"architectures": ["z"]}))) == 1


def test_refusals_are_one_sentence():
    check_differences([])
    with pytest.raises(ValueError, match=r"together: 0; 1; 2; 3; 4; and 3 others; --allow takes"):
        check_differences([str(number) for number in range(8)])


def test_damaged_configurations_are_refused(tmp_path):
    a, b = write(tmp_path / "a", {}), write(tmp_path / "b", "[1")
    with pytest.raises(ValueError, match=r"b.config.json is not a configuration, or it is damaged"):
        compare_configurations(a, b)


def test_which_configuration_belongs_to_a_checkpoint(tmp_path):
    a = write(tmp_path / "a", {"n": 1})
    assert find_folder(a) == find_folder(a / "model.safetensors") == a
    assert find_folder(a / "other.pt") is None
    assert find_folder(tmp_path) is None
    assert find_differences_of_folders(a, tmp_path) == []
    assert len(find_differences_of_folders(a, write(tmp_path / "b", {"n": 2}))) == 1


def make_tokenizer(**changes):
    content = {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
        "added_tokens": [{"id": 2, "content": "<s>"}],
    }
    return {**content, "truncation": None, **changes}


def test_tokenizers(tmp_path):
    name = "tokenizer.json"
    a, b = write(tmp_path / "a", make_tokenizer(), name), tmp_path / "b"
    b.mkdir()
    assert compare_tokenizers(a, b) == []  # one has none
    write(b, make_tokenizer(truncation={"max_length": 3}), name)
    assert compare_tokenizers(a, b) == []
    write(b, make_tokenizer(model={"type": "BPE", "vocab": {"a": 1, "b": 0}, "merges": []}), name)
    assert "differ in 2 tokens, such as a, which is 0 in" in compare_tokenizers(a, b)[0]
    write(b, make_tokenizer(added_tokens=[{"id": 2, "content": "<t>"}]), name)
    assert 'such as "<s>", which is 2 in' in compare_tokenizers(a, b)[0]
    write(b, make_tokenizer(normalizer={"type": "Lowercase"}), name)
    assert compare_tokenizers(a, b)[0].endswith("differ in normalizer")
    write(b, make_tokenizer(model={"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.0]], "merges": []}), name)
    assert compare_tokenizers(a, b)[0].endswith("differ in model")


def test_old_vocabularies(tmp_path):
    a, b = write(tmp_path / "a", "x\ny", "vocab.txt"), write(tmp_path / "b", "x\ny", "vocab.txt")
    assert compare_tokenizers(a, b) == []
    write(b, "y\nx", "vocab.txt")
    assert "differ in vocab.txt" in compare_tokenizers(a, b)[0]
