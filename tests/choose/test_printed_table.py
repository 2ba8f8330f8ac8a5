"""The tables of every command: aligned in a terminal, and as Markdown."""

from t5bench.printed_table import table, text_table


def test_numbers_are_aligned_at_their_point_and_empty_cells_stay_empty():
    rows = [
        {"layout": "DDP", "s": 1.23456, "batch": 8, "note": None},
        {"layout": "ZeRO-3", "s": 123456.0, "batch": 16, "note": ""},
        {"layout": "TP", "s": "", "batch": 1, "note": "*"},
    ]
    assert table(rows).splitlines() == [
        "layout            s    batch  note",
        "--------  ---------  -------  ------",
        "DDP       1.235            8",
        "ZeRO-3    1.235e+05       16",
        "TP                         1  *",
    ]
    assert table([{"MB": 1234567.0, "s": 0.5}], {"MB": ",.1f"}).splitlines()[-1] == "1,234,567.0  0.5"
    assert table([]) == ""


def test_titles_may_have_several_lines_and_cells_may_be_anything():
    shown = text_table([("a", 1), ("longer", None)], ("b\nc", "d"), ("left", "right"))
    assert shown.splitlines() == ["b          d", "c", "------  ----", "a          1", "longer  None"]
    assert text_table([("plain", "rows")]) == "plain  rows"


def test_a_table_in_markdown_says_how_its_columns_are_aligned():
    shown = text_table([("x", "1", "yes")], ("name", "count", "fits"), ("left", "right", "center"), is_markdown=True)
    assert shown.splitlines() == [
        "| name   |   count |  fits  |",
        "|:-------|--------:|:------:|",
        "| x      |       1 |  yes   |",
    ]
