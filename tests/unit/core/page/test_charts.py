"""Pictures as SVG: a legend that fits, names that are text, lines that are bounded."""

import re
import xml.etree.ElementTree as ET

from polyrl.history.fleet import WorkerLife
from polyrl.page.charts import MAX_POINTS, WIDTH, fleet_chart, lines_chart, nice_ticks, stacked_chart
from polyrl.page.contents import Series

HOSTILE = "</svg><script>alert(1)</script>"


def a_series(name: str, count: int = 3) -> Series:
    return Series(name, list(range(count)), values=[float(step) for step in range(count)])


def test_a_long_legend_goes_on_in_another_row() -> None:
    drawn = lines_chart([a_series(f"a name of some length {number}") for number in range(5)], "step")
    named = re.findall(r'<text x="([0-9.]+)" y="([0-9.]+)"[^>]*>a name', drawn)
    assert len({y for _, y in named}) > 1
    assert all(float(x) + 100 < WIDTH for x, _ in named)


def test_names_are_text_and_lines_are_bounded() -> None:
    life = WorkerLife(HOSTILE, 0.0, serving=1.0, ended=None)
    long = a_series(HOSTILE, 10_000)
    for drawn in (lines_chart([long], HOSTILE), stacked_chart([long], long, "step"), fleet_chart([life], 9.0)):
        assert "<script" not in drawn
        ET.fromstring(drawn)
        assert all(line.count(",") <= 2 * MAX_POINTS for line in re.findall(r'points="([^"]*)"', drawn))


def test_one_point_and_equal_values_have_scales() -> None:
    for values in ([0.0], [5.0, 5.0], [-1.0, 1.0]):
        ET.fromstring(lines_chart([Series("one", list(range(len(values))), values=values)], "step"))
    assert nice_ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
