import re

from bbalpha import plots
from bbalpha.report.page import Page, Picture, Pictures, Section, rendered
from bbalpha.report.svg import drawing, inline, label


def drawn(name, text):
    with drawing():
        figure = plots.new_figure(4, 3)
        ax = figure.subplots()
        for i in range(7):
            ax.plot([0, 1], [i, i + 1], **plots.line(i), marker="o")
        ax.fill_between([0, 1], [0, 1], [1, 2], color="#888888")
        ax.set(xlabel=text, title=text)
        return inline(figure, name=name, alt=text)


def test_figures_of_one_page_do_not_share_names(read):
    pictures = [Picture(drawn(name, "x"), "") for name in ("a", "b")]
    page = read(rendered(Page("t", "", [], [Section("s", [Pictures(pictures)])])))
    assert len(page.pictures()) == 2


def test_no_colour_is_left_that_the_dark_would_swallow():
    svg = drawn("a", "x")
    assert not re.findall(r"#[0-9a-fA-F]{6}", str(svg))
    assert all(f"--{name}" in svg for name in ("ink", "c0", "c1", "c3", "c4", "c5", "c6", "grey"))


def test_labels_out_of_data_are_text_and_nothing_else(read):
    text = r"$\frac{<b>&'\"$ #0072b2 id=\"x\" 漢字"
    svg = drawn("a", text)
    page = read(rendered(Page("t", "", [], [Section("s", [Pictures([Picture(svg, "")])])])))
    assert page.text.count(text) == 3  # title of the svg, title and label of the figure
    assert "http" not in svg


def test_a_label_is_one_short_line():
    assert label("a\nb\x00c") == "a b c"
    assert len(label("x" * 500)) == 40
