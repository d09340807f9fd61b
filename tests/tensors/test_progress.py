from onebasin.tensors.progress import show_progress


def test_a_line_a_function_or_nothing(capsys):
    seen = []
    for progress in (lambda *entry: seen.append(entry), False, True):
        with show_progress(progress) as report:
            report("sweep", 1, 3)
    assert seen == [("sweep", 1, 3)]
    captured = capsys.readouterr()
    assert captured.err == "\r\033[Ksweep: 1 of 3\n"
    assert not captured.out
