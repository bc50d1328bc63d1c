from __future__ import annotations

from xml.etree import ElementTree

from paceline.sweeps.pictures import svg
from paceline.sweeps.pictures.figure_data import sketch
from paceline.sweeps.pictures.importance import Importance
from tests.sweeps.pictures.trials import HOSTILE, SPEC, make_trials

DRAWN = sketch("title", SPEC, make_trials())
SVG = "{http://www.w3.org/2000/svg}"


def test_parallel_coordinates_have_a_line_for_each_trial_and_an_axis_for_each_column():
    tree = ElementTree.fromstring(svg.parallel(DRAWN.columns, DRAWN.lines))
    lines = tree.findall(f"{SVG}polyline")
    assert sorted(int(line.attrib["data-trial"]) for line in lines) == list(range(40))
    assert {len(line.attrib["points"].split()) for line in lines} == {6}
    failed = next(line for line in lines if line.attrib["data-trial"] == "3")
    assert failed.attrib["stroke-dasharray"] == "3 3"
    titles = [title.text or "" for title in tree.iter(f"{SVG}title")]
    assert any(text.startswith("trial 3, Failed\nlr ") for text in titles)
    assert len(tree.findall(f"{SVG}rect")) == 6
    assert any(text.text == "no value" for text in tree.iter(f"{SVG}text"))


def test_svg_history_has_a_mark_per_value_and_a_monotonic_best_line():
    tree = ElementTree.fromstring(svg.history(DRAWN.histories[0]))
    marks = {mark.attrib["data-trial"]: mark for mark in tree.iter() if "data-trial" in mark.attrib}
    assert len(marks) == 38
    # The mark of trial 0 is filled, those of trials 5 and 6 are hollow, and that of trial 4 is a cross.
    assert [marks[n].attrib["fill"] for n in "056"] == ["#1b2a7a", "#fff", "#fff"]
    assert marks["4"].tag == f"{SVG}path"
    (best,) = [path for path in tree.findall(f"{SVG}path") if path.attrib["class"] == "best"]
    heights = [float(part.split("H")[0]) for part in best.attrib["d"].split("V")[1:]]
    assert heights == sorted(heights)


def test_hostile_names_and_values_are_escaped_in_svg():
    pictures = svg.parallel(DRAWN.columns, DRAWN.lines) + svg.history(DRAWN.histories[0])
    pictures += svg.importance([Importance(f"{HOSTILE}\x1b", 0.5, 12, is_conditional=True)])
    assert "<svg onload" not in pictures
    assert "</script>" not in pictures
    assert "\x1b" not in pictures
    tree = ElementTree.fromstring(svg.importance([Importance(HOSTILE, 0.25, 12, is_conditional=True)]))
    assert [text.text for text in tree.iter(f"{SVG}text")] == [f"{HOSTILE[:25]}…", "25.0 % among 12 trials"]
