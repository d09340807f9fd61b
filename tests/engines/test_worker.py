import functools
import io
import operator

import pytest

from onebasin.engines.packing import pack
from onebasin.engines.worker import read_answer, read_frame, run_task, write_frame


def test_frames_end_with_the_other_side():
    stream = io.BytesIO()
    write_frame(stream, b"abc")
    write_frame(stream, b"")
    stream.seek(0)
    assert [read_frame(stream) for _ in range(3)] == [b"abc", b"", None]
    assert read_frame(io.BytesIO(b"\x05\0\0\0\0\0\0\0ab")) is None  # it died while it wrote


def test_results_and_errors_are_sent_back():
    answer = read_answer(run_task(pack((functools.partial(operator.add, 1), 2))[0], None, "worker 1"))
    assert answer.result == 3
    ((worker, spans),) = answer.spent
    assert worker == "worker 1"
    assert {span.what for span in spans} == {"other"}
    with pytest.raises(TypeError, match="bad operand"):
        read_answer(run_task(pack((abs, "text"))[0], None, "worker 1"))
    assert list(read_answer(run_task(pack((functools.partial(map, abs), [1]))[0], None, "")).result) == [1]
