"""Tables of slides, targets and predictions, and bags: slides as features or tiles."""

from __future__ import annotations

import csv
from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.bags import BagSource, BagViews, labels_of_tiles, open_tile_bags
from spatialdl.data.batches import Batch, Batching, BatchReader, PartBox
from spatialdl.data.feature_file import FeatureFile, list_features, write_features
from spatialdl.data.tables import find_predicted, read_labels, read_predicted, read_table
from spatialdl.data.targets import read_targets, sample_numbers, set_targets
from tests.bags import LENGTHS, TILE, write_tile_bags


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "table.csv"


def test_columns_and_rows_come_back(tmp_path: Path, file: Path) -> None:
    file.write_text("\ufeffslide_id, label ,site\n a.svs , x,\n\nb.svs,y,1\n", encoding="utf-8")
    table = read_table(file)
    assert (table.key, table.columns) == ("slide_id", ("slide_id", "label", "site"))
    assert table.slides == ["a.svs", "b.svs"]
    assert table.column("label") == ["x", "y"]
    table.with_splits(["train", "val"]).save(tmp_path / "out" / "made.csv")
    again = read_table(tmp_path / "out" / "made.csv")
    assert again.columns == (*table.columns, "split")
    assert again.column("split") == ["train", "val"]
    assert again.with_splits(["val", "val"]).columns == again.columns
    with pytest.raises(ValueError, match="no column patient; its columns are slide"):
        table.column("patient")


@pytest.mark.parametrize("kind", ["semicolon", "tab", "comma", "xlsx", "parquet"])
def test_a_table_is_the_same_in_all_formats(tmp_path: Path, kind: str) -> None:
    rows = [["file", "case_id", "Größe, mm"], ["ä; 1.svs", "p", "2.5"], ["b.svs", "", "3"]]
    file = tmp_path / f"table.{kind}"
    if kind == "xlsx":
        book = pytest.importorskip("openpyxl").Workbook()
        sheet = book.active
        for row in [rows[0], [*rows[1][:2], 2.5], ["b.svs", None, 3]]:
            sheet.append(row)
        sheet["E9"] = ""
        book.save(file)
    elif kind == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        columns = {name: [row[k] for row in rows[1:]] for k, name in enumerate(rows[0])}
        parquet.write_table(arrow.table(columns), file)
    else:
        encoding = {"semicolon": "utf-8", "tab": "utf-16", "comma": "utf-8-sig"}[kind]
        with file.open("w", encoding=encoding, newline="") as text:
            delimiter = {"semicolon": ";", "tab": "\t", "comma": ","}[kind]
            csv.writer(text, delimiter=delimiter).writerows(rows)
    table = read_table(file, required=["Größe, mm"])
    assert (table.key, table.patient, table.slides) == ("file", "case_id", ["ä; 1.svs", "b.svs"])
    assert table.column("Größe, mm") == ["2.5", "3"]
    assert [row.patient for row in table.rows] == ["p", None]


def test_rows_match_names_without_suffix_and_folders(file: Path) -> None:
    """The suffixes of volumes were taken off in lower case only, and that of `.ome` from slides."""
    names = ["x/A.NII.GZ", "b.ome.TIF", "c.nhdr", "d.ome.svs", "/e/f.tif"]
    file.write_text("slide,label\n" + "".join(f"{name},1\n" for name in names))
    rows, missing = read_labels(file, None).match(["A", "b", "c", "d", "e_f.tif"])
    assert (list(rows), missing) == (["A", "b", "c", "e_f.tif"], ["d.ome.svs"])


def test_columns_of_labels_are_those_without_another_meaning(file: Path) -> None:
    file.write_text("slide,er,case_id,pr,split\na.svs,1,p,,train\n\nb, 0 ,q,1,val\n")
    found = read_labels(file, None)
    assert found.labels == ("er", "pr")
    assert found.rows[0].labels == ("1", "")
    assert (found.rows[1].labels, found.rows[1].patient) == (("0", "1"), "q")
    rows, missing = found.match(["a", "c"])
    assert (list(rows), missing) == (["a"], ["b"])
    with pytest.raises(ValueError, match="has no column stage; its columns are slide, er"):
        read_labels(file, ["stage"])
    file.write_text("slide,label\na.svs,1\na,0\n")
    with pytest.raises(ValueError, match=r"line 3: 'a\.svs' and 'a' both match slide 'a'"):
        read_labels(file, None).match(["a"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        (b"slide,label\n\xff\xfe,1\n", "not a UTF-8"),
        (b"", "its columns are none: it is empty"),
        (b"name,label\na,1\n", "no column slide or slide_id"),
        (b"slide,label,label\na,1,1\n", "two columns 'label'"),
        (b"slide,label\n", "no rows"),
        (b"slide,label\na,1,2\n", "line 2 has 3 cells"),
        (b"slide,label\n,1\n", "line 2: slide is empty"),
        (b"slide,label\na,1\na,0\n", "line 3: slide 'a' is already in .*line 2"),
    ],
)
def test_malformed_tables_are_refused(file: Path, text: bytes | None, message: str) -> None:
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(ValueError, match=message):
        read_table(file)


def test_bags_need_labels_and_one_split_of_a_patient(file: Path) -> None:
    for text, message in [
        (
            "slide,split\na,train\n",
            "no column label; its columns are slide, split: set label",
        ),
        ("slide,label,patient,split\na,1,p,train\nb,1,p,val\n", "patient p is in train and val"),
    ]:
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_labels(file, None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six tiles of two slides, val and train by turns."""
    with ShardWriter(tmp_path / "set", ()) as shards:
        for number in range(6):
            split = "train" if number % 2 else "val"
            shards.add(np.zeros((4, 4, 3), np.uint8), None, split, slide="ab"[number // 3])
    return tmp_path / "set"


def test_targets_of_slides_and_of_samples_over_all_splits(folder: Path, file: Path) -> None:
    file.write_text("slide,er,pr\nb,1,\nc,0,0\n\na,0, -1 \n")
    sources = [ShardDataset(folder, split) for split in ("train", "val")]
    assert set_targets(file, sources, folder, binary=True) == ["er", "pr"]
    nan = np.nan
    np.testing.assert_equal(sources[0].labels, [[0, nan], [1, nan], [1, nan]])
    np.testing.assert_equal(sources[1].labels, [[0, nan], [0, nan], [1, nan]])
    lines = "".join(f"{number},{10 * number - 5.5}\n" for number in range(6))
    file.write_text("sample,age\n" + lines)
    assert set_targets(file, sources[:1], folder, False) == ["age"]
    np.testing.assert_equal(sources[0].labels, [[4.5], [24.5], [44.5]])
    assert sample_numbers(sources[0]) == [1, 3, 5]
    assert sample_numbers(ShardDataset(folder)) == list(range(6))
    file.write_text("slide,age\na,-1\n")
    assert read_targets(file, binary=False)[1] == {"a": [-1]}


@pytest.mark.parametrize(
    ("text", "binary", "sentence"),
    [
        ("slide,age\na,inf\n", False, "line 2, age: inf is not finite"),
        ("name,er\na,1\n", True, "no column sample or slide or .*; its columns are name, er"),
        ("slide\na\n", True, "has no column label; its columns are slide: set"),
        ("slide,er\na,yes\n", True, "line 2, er: 'yes' is not a number"),
        ("slide,er\na,2\n", True, "line 2, er: 2 must be 1 .*0"),
        ("slide,er\na,1\n", True, "no line for 1 of the slides of .*, such as slide 'b'; it has 1"),
        ("slide,er\na,\nb,nan\n", True, "has only empty targets for "),
        ("sample,er\n0,1\n6,1\n", True, "no sample 6, expected 0 to 5"),
        ("sample,er\n00,1\n", True, "no sample 00"),
        ("sample,er\n1,1\n", True, "no line for 2 of the samples of .*, such as sample '3'"),
    ],
)
def test_targets_that_do_not_fit_are_refused(folder, file, text, binary, sentence) -> None:
    file.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        set_targets(file, [ShardDataset(folder, "train")], folder, binary)


def test_predictions_of_both_kinds_are_the_same_columns_of_text(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    assert find_predicted(tmp_path, "a") is None
    columns = {"slide": ["a, b", "c"], "n": [3, 4], "a;b;c;d": [None, "bad"]}
    arrow.parquet.write_table(arrow.table(columns), tmp_path / "a.parquet")
    assert find_predicted(tmp_path, "a") == tmp_path / "a.parquet"
    (tmp_path / "a.csv").write_text('\ufeffslide,n,a;b;c;d\n"a, b",3,\nc,4,bad\n', encoding="utf-8")
    assert find_predicted(tmp_path, "a") == tmp_path / "a.csv"
    expected = {"slide": ["a, b", "c"], "n": ["3", "4"], "a;b;c;d": ["", "bad"]}
    assert read_predicted(tmp_path / "a.csv") == read_predicted(tmp_path / "a.parquet") == expected


def test_malformed_predictions_are_refused_and_long_cells_are_none(tmp_path: Path) -> None:
    for name, content, message in [
        ("a.csv", b"", "it is empty"),
        ("a.parquet", b"no table", r"cannot read .*a\.parquet: "),
        ("a.xlsx", b"no table", r"cannot read .*a\.xlsx: "),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_predicted(tmp_path / name)
    csv.field_size_limit(131_072)  # Python's own; it stayed at the largest, and hid damaged logs
    (tmp_path / "a.csv").write_text(f"a\n{'s' * 200_000}\n")
    assert len(read_predicted(tmp_path / "a.csv")["a"][0]) == 200_000
    assert csv.field_size_limit() == 131_072


def features_of(tiles: int, width: int = 5, dtype: str = "float16") -> np.ndarray:
    return np.random.default_rng(tiles).standard_normal((tiles, width)).astype(dtype)


def bags(folder: Path, lengths=(5, 1, 9)) -> BagSource:
    files = [
        write_features(folder / f"s{n}.h5", features_of(tiles, 3, "float32"), None)
        for n, tiles in enumerate(lengths)
    ]
    return BagSource(files, np.arange(len(files)), ["a", "b", "c"])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_features_come_back_as_they_were_written(tmp_path: Path, dtype: str) -> None:
    features, coords = features_of(7, dtype=dtype), np.arange(14).reshape(7, 2)
    path = tmp_path / "h5" / "slide 1.h5"
    file = write_features(path, features, coords, {"patch_size": 256}, {"encoder": "net"})
    assert (file.slide, file.tiles, file.width, file.dtype) == ("slide 1", 7, 5, dtype)
    assert file.attributes["patch_size"] == 256
    np.testing.assert_array_equal(file.read(), features)
    np.testing.assert_array_equal(file.read(2, 4), features[2:4])
    np.testing.assert_array_equal(file.coords(), coords)
    assert [one.name for one in path.parent.iterdir()] == ["slide 1.h5"]  # nothing temporary
    with h5py.File(tmp_path / "leading.h5", "w") as h5:
        h5["features"] = features[None]
    file = FeatureFile.open(tmp_path / "leading.h5")
    assert (file.tiles, file.width, file.has_coords) == (7, 5, False)
    np.testing.assert_array_equal(file.read(1), features[1:])
    with pytest.raises(ValueError, match="tile coordinates are unknown"):
        file.coords()
    file = write_features(tmp_path / "none.h5", features_of(0), np.zeros((0, 2), np.int64))
    assert (file.tiles, file.read().shape) == (0, (0, 5))


def test_what_is_no_table_of_features_is_refused(tmp_path: Path) -> None:
    for features, coords, message in [
        (np.zeros((2, 3, 4)), None, "shape"),
        (np.zeros((2, 3), int), None, "floats"),
        (np.zeros((2, 3)), np.zeros((3, 2), int), "expected"),
    ]:
        with pytest.raises(ValueError, match=message):
            write_features(tmp_path / "a.h5", features, coords)
    assert not list(tmp_path.iterdir())
    (tmp_path / "text.h5").write_text("no HDF5")
    with h5py.File(tmp_path / "coords.h5", "w") as h5:
        h5["coords"] = np.zeros((2, 2), int)
    with h5py.File(tmp_path / "apart.h5", "w") as h5:
        h5["features"], h5["coords"] = np.zeros((3, 2)), np.zeros((2, 2), int)
    for name in ("text", "coords", "apart", "missing"):
        with pytest.raises(ValueError, match=f"{name}.h5 has no readable features"):
            FeatureFile.open(tmp_path / f"{name}.h5")


def test_folders_are_listed_by_slide(tmp_path: Path) -> None:
    for name in ("out/h5/b", "out/h5/a", "c"):
        write_features(tmp_path / f"{name}.h5", features_of(2), None)
    write_features(tmp_path / "d.h5", features_of(2, width=6), None)
    out = tmp_path / "out"
    assert [one.slide for one in list_features([tmp_path / "c.h5", out])] == ["a", "b", "c"]
    (tmp_path / "empty").mkdir()
    for paths, message in [
        ([out, out / "h5" / "a.h5"], "have the same slide name"),
        ([out, tmp_path / "d.h5"], "must come from one encoder"),
        ([tmp_path / "empty"], "no feature files"),
    ]:
        with pytest.raises(ValueError, match=message):
            list_features(paths)


def test_a_rank_reads_its_part_of_each_bag(tmp_path: Path) -> None:
    source = bags(tmp_path)
    assert [source.image_size(n) for n in range(3)] == [(5,), (1,), (9,)]
    assert source.channels == 3
    assert source.read(0, (2, 4)).tolist() == source.read(0)[2:4].tolist()
    assert source.read(1, (1, 1)).shape == (0, 3)
    with pytest.raises(ValueError, match="not inside the slide s1 of 1"):
        source.read(1, (0, 2))
    views = BagViews(source, (9,))
    parts = []
    for part in range(2):
        boxes = [PartBox((2,), part)] * 3
        reader = BatchReader(views, Batching(3, 1, 0, boxes, [None] * 3))
        parts.append(reader.read(Batch(0, np.array([2, 0, 1]))))
    for number, sample in enumerate((2, 0, 1)):
        both = [slices[number].tiles[0].numpy() for slices in parts]
        assert np.concatenate(both).tolist() == source.read(sample).tolist()
        assert parts[0][number].size == source.image_size(sample)
        assert parts[0][number].place == number
    assert [len(one.tiles[0]) for one in parts[0]] == [4, 2, 0]  # none of a bag of one tile


def test_some_tiles_are_drawn_anew_each_epoch(tmp_path: Path) -> None:
    source = bags(tmp_path)
    views = BagViews(source, (9,), seed=3, max_tiles=4)
    assert (views.size_of(2), views.size_of(1)) == ((4,), (1,))
    drawn = [views.read(epoch, 2, (0, 4)).tolist() for epoch in range(4)]
    rows = source.read(2).tolist()
    for one in drawn:
        places = [rows.index(row) for row in one]
        assert places == sorted(set(places))
    assert len({str(one) for one in drawn}) > 1
    assert views.read(1, 2, (1, 3)).tolist() == drawn[1][1:3]
    assert views.read(1, 2, (2, 2)).shape == (0, 3)


def test_what_is_no_bag_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without tiles: s1"):
        bags(tmp_path, (2, 0))
    with pytest.raises(ValueError, match="at least one slide"):
        BagSource([], np.zeros(0), [])
    broken = write_features(tmp_path / "n.h5", np.array([[1.0, np.nan]]), None)
    with pytest.raises(ValueError, match=r"n\.h5 has NaN or Inf features"):
        BagSource([broken], np.zeros(1), ["a"]).read(0)


def test_a_bag_of_pixels_has_the_tiles_of_its_slide_in_order(tmp_path: Path) -> None:
    folder = write_tile_bags(tmp_path) / "tiles"
    found, classes = open_tile_bags(folder)
    assert [bag.tiles for bag in found] == list(LENGTHS)
    dataset, bag = ShardDataset(folder), found[2]
    own = [n for n in range(len(dataset)) if dataset.sample(n).slide == "s2"]
    expected = np.stack([dataset.read(n).transpose(2, 0, 1) for n in own])
    assert (bag.tile, bag.width) == (TILE, expected[0].size)
    np.testing.assert_array_equal(bag.read().reshape(expected.shape), expected)
    np.testing.assert_array_equal(bag.read(4, 9), bag.read()[4:9])
    assert bag.read(3, 3).shape == (0, bag.width)
    assert bag.coords()[:3].tolist() == [[0, 0], [8, 0], [16, 0]]
    table = labels_of_tiles(found, classes)
    assert "split" in table.columns
    assert [row.labels for row in table.rows][:4] == [("a",), ("b",), ("c",), ("a",)]
    assert [row.split for row in table.rows].count("val") == 3


@pytest.mark.parametrize(
    ("tiles", "dtype", "said"),
    [
        (
            [{"slide": "s", "label": 0}, {"slide": "s", "label": 1}],
            "uint8",
            r"s .* different label",
        ),
        ([{"slide": "s"}, {}], "uint8", r"1 of 2 tiles .* have no slide name"),
        ([{"slide": "s"}], "float32", "has float32 pixels"),
    ],
)
def test_tiles_that_make_no_bags_are_refused(tmp_path: Path, tiles, dtype: str, said: str) -> None:
    with ShardWriter(tmp_path / "own", classes=["a", "b"]) as writer:
        for known in tiles:
            writer.add(np.zeros((4, 4, 3), dtype), **known)
    with pytest.raises(ValueError, match=said):
        labels_of_tiles(*open_tile_bags(tmp_path / "own"))
