"""How launches are configured, which needs neither Triton nor a GPU."""

from onebasin.operator.launch import REGISTERS_PER_SM, _pad, configure_resident, configure_streaming


def test_streaming_programs_fit_on_the_device():
    for num_sms in (1, 20, 132):
        for n in (129, 200, 512, 1000, 4096, 8192):
            for batch in (1, 3, 32, 500):
                config = configure_streaming(n, batch, num_sms)
                assert 1 <= config.num_ranks * config.num_slots <= 2 * num_sms
                assert config.num_slots <= batch


def test_resident_tiles_fit_on_the_device_and_cover_the_rows():
    for num_sms in (1, 20, 132):
        for n in (2, 64, 128, 129, 200, 256, 300, 512, 513, 1024, 1025):
            for batch in (1, 2, 3, 32, 500):
                config = configure_resident(n, batch, num_sms)
                if config is None:
                    assert n > 128
                    continue
                assert config.num_slots == batch
                assert (config.num_ranks - 1) * config.rows < n <= config.num_ranks * config.rows
                assert n <= 1024
                if config.num_ranks > 1:
                    programs_per_sm = -(-config.num_ranks * batch // num_sms)
                    assert 255 * 32 * config.num_warps * programs_per_sm <= REGISTERS_PER_SM
                    assert 32 * config.num_warps <= _pad(n)  # no two threads read one message word
    assert configure_resident(512, 2, 132) is not None
    assert configure_resident(1024, 2, 132) is not None
