import pytest

from onebasin.reporting.model_card import MARK, Ingredient, ModelCard, put_in_front, render_card

CARD = ModelCard(
    "merged",
    "An average of 2 models.",
    [Ingredient("a", "weight 0.5", {"model.safetensors": "ab12"}), Ingredient("b", "weight 0.5", {"x": "cd", "y": "ef"})],
    "onebasin merge a b -o merged",
    {"seed": "0", "date": "2026-01-01"},
    recipe="models: [a, b]\n",
)


def test_everything_is_said():
    text = render_card(CARD)
    assert text.startswith(f"{MARK}\n\n# merged\n\nAn average of 2 models.\n")
    assert "| `a` | weight 0.5 | `model.safetensors` `ab12` |" in text
    assert "| `b` | weight 0.5 | `x` `cd`<br>`y` `ef` |" in text
    assert "```console\n$ onebasin merge a b -o merged\n```" in text
    assert "```yaml\nmodels: [a, b]\n```" in text
    assert "- seed: 0\n- date: 2026-01-01\n" in text


@pytest.mark.parametrize(
    "head", [b"---\nlicense: mit\ntags:\n- x\n---\n", b"---\r\nlicense: mit\r\n---\r\n", b"---\n---\n", b"---\na: 1\n---"]
)
def test_entries_for_the_hub_stay_in_front_and_no_text_is_lost(head):
    body = "# A\n\nMit Umlaut: ä\n---\nrest".encode() + b"\xff"
    text = head + (body if head.endswith(b"\n") else b"")
    found = put_in_front(CARD, text)
    assert found.startswith(head)
    assert found.count(b"tags:") == head.count(b"tags:")
    assert b"# merged" in found[len(head) :]
    assert found.endswith(text[len(head) :])


def test_without_entries_there_are_tags():
    found = put_in_front(CARD, b"# A\n").decode()
    assert found.startswith(f"---\ntags:\n- onebasin\n---\n\n{MARK}\n\n# merged\n")
    assert found.endswith("\n---\n\n# A\n")
    assert put_in_front(CARD, b"").decode().endswith("- date: 2026-01-01\n")
    assert put_in_front(CARD, b"a --- b\n---\n").decode().endswith("\n---\n\na --- b\n---\n")  # not at the beginning


def test_names_are_no_markup():
    name = "a|b`c``d\n<script>\x1b"
    text = render_card(ModelCard("t<b>", "s_*", [Ingredient(name, "[x](y)", {})], "echo '```'\n", {"<i>": "|"}))
    assert "t\\<b\\>" in text
    assert "s\\_\\*" in text
    assert "``` a\\|b`c``d\\n<script>\\x1b ``` | \\[x\\](y) |" in text
    assert "````console\n$ echo '```'\n\n````" in text
