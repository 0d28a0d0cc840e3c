"""Which measure of diversity is fooled by which trick."""

import pytest

from docs.pages import generator

blind_spots = generator("generate_pages").load_blind_spots()

# in the order of blind_spots.TRICKS; x = fooled
FOOLED = {
    "Dist": "x..x..xxxxxxx",
    "cosine": "....x..xxxxxx",
    "squared cosine": "....x....xxxx",
    "linear CKA": "...........x.",
    "debiased CKA": "...........x.",
    "debiased CKA of contributions": ".............",
    "unbiased HSIC": "...x..x....x.",
    "HSIC with RBF kernels, x 1,000": ".............",
    "cross-correlation": ".............",
    "cross-correlation, matched": ".........xxx.",
    "span of W_V": ".............",
    "span of W_O": ".............",
    "squared cosine of W_V W_O": ".............",
    "log determinant of CKA": ".....x.....x.",
    "disagreement of predictions": ".......xx...x",
    "effective heads, cosine": "....x..xxxxx.",
    "effective heads, squared cosine": "....x....xxx.",
    "effective heads, debiased CKA": "...........x.",
    "effective heads of contributions": ".............",
    "the same, weighted by variance": "x............",
}


@pytest.fixture(scope="module")
def table():
    return blind_spots.measure_all()


@pytest.mark.parametrize("name", blind_spots.MEASURES)
def test_what_fools_a_measure(name: str, table: dict[str, dict[str, float]]):
    found = "".join("x" if blind_spots.is_fooled(name, table[name], trick) else "." for trick in blind_spots.TRICKS)
    assert found == FOOLED[name]


def test_values_of_the_recommended_measure(table: dict[str, dict[str, float]]):
    values = table["effective heads of contributions"]
    assert values["different"] == pytest.approx(8, abs=0.001)
    assert values["pairs of opposite sign"] == pytest.approx(4, abs=0.001)
    assert values["copies in other bases"] == pytest.approx(1, abs=0.001)
    assert values["noisy copies"] == pytest.approx(1.013, abs=0.001)


def test_uniform_attention_is_least_for_the_position_term_and_no_diversity():
    table = blind_spots.measure_attention()
    assert min(table, key=lambda case: table[case]["position term"]).startswith("uniform")
    assert table["uniform, own"]["position term"] == pytest.approx(1 / 32)
    assert table["uniform, own"]["Jensen-Shannon"] == pytest.approx(0, abs=1e-12)
    # equal attention to values of their own is seen by the divergence alone
    assert table["same, own"]["effective heads"] > 7.8
    # queries of one text that say the same are taken for evidence
    assert table["uniform, own"]["effective heads"] == pytest.approx(2.974, abs=0.001)
