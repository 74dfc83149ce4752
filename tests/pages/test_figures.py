from __future__ import annotations

from xml.etree import ElementTree

from matplotlib.figure import Figure

from spatialdl.pages.figures import as_svg


def figure() -> Figure:
    made = Figure(figsize=(2, 1))
    panel = made.subplots()
    panel.plot([0, 1], [1, 0])
    panel.set_title("a < b & c")
    return made


def test_a_figure_is_one_element_with_its_words_as_text() -> None:
    text = as_svg(figure())
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    words = [
        "".join(one.itertext()).strip() for one in root.iter("{http://www.w3.org/2000/svg}text")
    ]
    assert "a < b & c" in words


def test_the_same_figure_gives_the_same_text() -> None:
    assert as_svg(figure()) == as_svg(figure())
