import pytest

from onebasin.engines import LocalEngine, make_engine, opened


def test_engines_by_name():
    assert make_engine().name == "local"
    assert make_engine("processes", workers=3).workers == 3
    with pytest.raises(ValueError, match="'local', 'processes' or 'ray', got 'spark'"):
        make_engine("spark")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no address"):
        make_engine("processes", address="auto")
    with pytest.raises(ValueError, match="in one process"):
        make_engine("local", workers=2)


def test_what_was_given_is_left_open():
    given = LocalEngine()
    with opened(given) as same, opened(None) as default, opened("local") as named:
        assert same is given
        assert not default.is_checked
        assert named.is_checked
    with pytest.raises(TypeError, match="make_engine"), opened(3):  # type: ignore[arg-type]
        pass
