"""Damaged permutations and transforms are refused in one sentence, whichever command reads them."""

import pytest

from tests.cli.attacks import check_refused
from tests.cli.cli_files import MLP
from tests.cli.damaged_elements import PERMUTATIONS, TRANSFORMS, rewrite

ALIGN = ("align", "a.safetensors", "b.pt", "-o", "out.pt", *MLP, "--no-check", "--no-detect-copy")
READERS = {
    "apply": ("apply", "x.safetensors", "a.safetensors", "-o", "out.safetensors"),
    "init": (*ALIGN, "--init", "x.safetensors"),
}


HARMLESS = {("init", "a layout of another shape"), ("init", "a layout of another model")}
"""A start is the order of the units of each group: it does not need the layouts."""


@pytest.mark.parametrize(("damage", "reader"), [(d, r) for d in PERMUTATIONS for r in READERS if (r, d) not in HARMLESS])
def test_damaged_permutations_are_refused(onebasin, attacked, damage, reader):
    rewrite(attacked / "p.safetensors", attacked / "x.safetensors", PERMUTATIONS[damage])
    check_refused(onebasin, attacked, *READERS[reader])


@pytest.mark.parametrize("damage", TRANSFORMS)
def test_damaged_transforms_are_refused(onebasin, attacked, damage):
    rewrite(attacked / "t.safetensors", attacked / "x.safetensors", TRANSFORMS[damage])
    check_refused(onebasin, attacked, "apply", "x.safetensors", "n.safetensors", "-o", "out.safetensors")


def test_what_is_not_damaged_is_taken(onebasin, attacked):
    for element, file in (("p.safetensors", "a.safetensors"), ("t.safetensors", "n.safetensors")):
        rewrite(attacked / element, attacked / "x.safetensors", lambda header, tensors: None)
        assert onebasin("apply", "x.safetensors", file, "-o", "out.safetensors", "--force").code == 0
    rewrite(attacked / "p.safetensors", attacked / "x.safetensors", lambda header, tensors: None)
    assert onebasin(*READERS["init"]).code == 0
