"""The link: what PCIe promises."""

import pytest

from overspill.figures import Origin, assumed, derived, measured
from overspill.hardware.gpu import link_from_pcie, pcie_bytes_per_second


@pytest.mark.parametrize(
    ("generation", "width", "gb_s"),
    [
        (1, 16, 4.0),
        (2, 16, 8.0),
        (3, 16, 15.75),
        (4, 8, 15.75),
        (4, 16, 31.5),
        (5, 16, 63.0),
        (6, 16, 121),
        (7, 16, 121),
    ],
)
def test_pcie_rates_are_those_of_the_specification(generation: int, width: int, gb_s: float) -> None:
    assert pcie_bytes_per_second(generation, width) / 1e9 == pytest.approx(gb_s, rel=0.001)


def test_a_link_that_is_not_measured_is_derived_from_pcie() -> None:
    found = link_from_pcie(measured(5), measured(16))
    assert found == derived(53_563_076_922, note="85% of PCIe 5.0 x16")


def test_a_link_from_a_stated_pcie_generation_is_assumed() -> None:
    assert link_from_pcie(assumed(5), measured(16)).origin is Origin.ASSUMED


def test_without_knowing_pcie_the_slowest_common_link_is_assumed() -> None:
    for found in (link_from_pcie(None, measured(16)), link_from_pcie(measured(4), None)):
        assert found.origin is Origin.ASSUMED
        assert found.value == pytest.approx(13.4e9, rel=0.01)
