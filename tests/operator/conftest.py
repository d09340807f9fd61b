import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Matrices this small gain nothing from threads, and lose much where the cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
