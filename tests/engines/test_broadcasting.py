from onebasin.engines.broadcasting import Broadcasts
from onebasin.engines.packing import unpack


def test_what_a_value_needs_comes_with_it():
    inner = list(range(50))
    outer = {"inner": inner}
    held = Broadcasts()
    with held.hold([inner, outer]) as tokens, held.hold([inner]) as again:
        assert again == []  # it is held already
        content, needed = held.pack((outer, 1))
        assert set(needed) == set(tokens)
        values: dict = {}

        def fetch(token):
            return values.setdefault(token, None) or unpack(needed[token], fetch)

        assert unpack(content, fetch) == (outer, 1)
    assert held.pack((outer, 1))[1] == {}
    assert not any(token in held for token in tokens)
