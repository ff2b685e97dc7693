import pytest

from bbalpha.report.page import Bar, Commands, Page, Points, Section, Table, Text, rendered, write_report

NASTY = "</style><script>alert('x')</script> & \"quoted\" `co<de>`"


def page(text):
    blocks = [
        Text(text), Points([text]), Commands(text),
        Table([text, text], [[text, Bar(text, 0.5)], [text, text]], text, text_columns=(1,)),
    ]  # fmt: skip
    return Page(text, text, [(text, text, text)], [Section(text, blocks)])


def test_text_of_every_kind_is_escaped_and_none_is_lost(read):
    html = rendered(page(NASTY))
    found = read(html)
    assert "<script" not in html
    wanted = "</style><script>alert('x')</script> & \"quoted\""
    assert found.plain().count(wanted) == 18
    assert html.count("</style>") == 1


def test_backticks_become_code(read):
    html = rendered(page("run `make <it>`"))
    read(html)
    assert "<code>make &lt;it&gt;</code>" in html


def test_a_page_follows_the_reader_into_the_dark_and_onto_paper():
    html = rendered(page("x"))
    assert "prefers-color-scheme: dark" in html
    assert "@media print" in html
    assert "break-inside: avoid" in html


def test_a_report_is_written_whole(tmp_path):
    path = write_report("<p>é</p>", tmp_path / "a.html")
    assert path.read_text(encoding="utf-8") == "<p>é</p>"
    assert [p.name for p in tmp_path.iterdir()] == ["a.html"]
    with pytest.raises(FileNotFoundError, match="make it first"):
        write_report("x", tmp_path / "none" / "a.html")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        write_report("x", tmp_path)
