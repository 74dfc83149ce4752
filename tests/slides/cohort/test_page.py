"""The page of a cohort: the oddest slides first, everything escaped, tables by split."""

from __future__ import annotations

import csv
from pathlib import Path

from spatialdl.slides.cohort.measuring import SlideMeasures
from spatialdl.slides.cohort.page import members_of, save_cohort


def slides() -> tuple[list[SlideMeasures], dict[str, dict[str, str]]]:
    measured = [
        SlideMeasures(f"s{k}", Path(f"{k}.svs"), {"blur": 0.3 + k / 100, "mpp": 0.5}, "aperio X")
        for k in range(6)
    ]
    measured.append(SlideMeasures("far", Path("f.svs"), {"blur": 0.9, "mpp": 0.5}, "aperio X"))
    measured.append(SlideMeasures("<b>", Path("b.svs"), problem="cannot open <it>"))
    facts = {
        f"s{k}": {"label": "ab"[k % 2], "split": ("train", "val")[k // 4], "patient": f"p{k // 2}"}
        for k in range(6)
    }
    facts["s5"]["predicted"] = "a"
    facts["s4"]["predicted"] = "a"
    return measured, facts


def test_the_oddest_come_first():
    members = members_of(*slides())
    assert [member.measures.name for member in members[:3]] == ["<b>", "s5", "far"]
    assert members[0].remarks == ["cannot open <it>"]
    assert members[1].remarks == ["predicted a, the label is b"]
    assert members[2].remarks[0].startswith("blur is high: 0.9")
    assert not any(member.remarks for member in members[3:])


def test_page_and_table_have_all_slides(tmp_path):
    members = members_of(*slides())
    save_cohort(tmp_path, members)
    with (tmp_path / "cohort.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["slide"] for row in rows] == [member.measures.name for member in members]
    assert rows[2]["blur"] == "0.9"
    assert rows[0]["remarks"] == "cannot open <it>"
    page = (tmp_path / "cohort.html").read_text()
    assert "<title>Cohort of 8 slides</title>" in page
    assert "cannot open &lt;it&gt;" in page
    assert "<b>" not in page.replace("<body>", "")
    assert page.count("<svg") == 1
    flat = page.replace("\n", "")
    assert '<td>patients</td><td class="number">2</td><td class="number">1</td>' in flat
    assert '<td>slides</td><td class="number">4</td><td class="number">2</td>' in flat


def test_nothing_that_is_known_is_no_reason_to_have_no_page(tmp_path):
    save_cohort(tmp_path, members_of([SlideMeasures("a", None, problem="gone")], {}))
    assert "gone" in (tmp_path / "cohort.html").read_text()
