from onebasin.engines.work_meter import WorkMeter


def test_the_whole_is_what_is_expected_or_done():
    told = []
    meter = WorkMeter()
    meter.expect("a", 4e6)
    meter.advance("a", 1e6)  # nobody wants to know
    with meter.reporting(lambda *each: told.append(each)), meter.reporting(lambda *each: told.append("never")):
        meter.expect("b", 10e6)
        meter.advance("a", 1e6)
        meter.expect_left("b", 5e6)
        meter.advance("b", 6e6)
        meter.finish("a")
    assert told == [("a, MB", 2, 14), ("b, MB", 8, 10), ("a, MB", 8, 8)]
    meter.advance("a", 1e6)
    assert len(told) == 3
