import functools
import io
import operator

from onebasin.engines.packing import pack, unpack
from onebasin.engines.worker import read_frame, run_task, write_frame


def test_frames_end_with_the_other_side():
    stream = io.BytesIO()
    write_frame(stream, b"abc")
    write_frame(stream, b"")
    stream.seek(0)
    assert [read_frame(stream) for _ in range(3)] == [b"abc", b"", None]
    assert read_frame(io.BytesIO(b"\x05\0\0\0\0\0\0\0ab")) is None  # it died while it wrote


def test_results_and_errors_are_sent_back():
    is_done, result, seconds = unpack(run_task(pack((functools.partial(operator.add, 1), 2))[0], None))
    assert (is_done, result) == (True, 3)
    assert "other" in seconds
    is_done, result, _ = unpack(run_task(pack((abs, "text"))[0], None))
    assert not is_done
    assert isinstance(result, TypeError)
    is_done, result, _ = unpack(run_task(pack((functools.partial(map, abs), [1]))[0], None))
    assert is_done
