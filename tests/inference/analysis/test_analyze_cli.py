"""`spatialdl-analyze` on feature files, from options to tables and pictures."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image
from sklearn import cluster, decomposition, linear_model, neighbors

from spatialdl.data.feature_file import FeatureFile, write_features
from spatialdl.inference.analysis.analyze_cli import main
from tests.inference.evaluating.cases import read_rows

RNG = np.random.default_rng(5)
SIZES = {"a": 40, "b": 0, "c": 25, "d": 1, "e": 33, "f": 12}
CENTRES = RNG.normal(size=(3, 6)) * 3
FEATURES = {
    name: (CENTRES[RNG.integers(0, 3, n)] + RNG.normal(size=(n, 6))).astype(np.float16)
    for name, n in SIZES.items()
}
ROWS = np.concatenate(list(FEATURES.values())).astype(np.float64)


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    for name, rows in FEATURES.items():
        index = np.arange(len(rows))
        coords = None if name == "f" else np.stack([index % 7, index // 7], 1) * 64
        write_features(folder / f"{name}.h5", rows, coords, {"patch_size_level0": 64})
    return folder


def run(*words):
    assert main([str(word) for word in words]) == 0


def column(folder, name):
    """Of the tiles of all slides."""
    rows = [row for slide in SIZES for row in read_rows(folder / "tiles" / f"{slide}.csv")]
    return np.array([float(row[name]) for row in rows])


def has_picture(path):
    """Whether it is a picture with something in it."""
    with Image.open(path) as picture:
        return np.asarray(picture.convert("L")).std() > 5


def test_kmeans_and_its_model_applied(features, tmp_path):
    out = tmp_path / "out"
    run("kmeans", features, "-k", 3, "--seed", 2, "--geojson", "--out", out)
    theirs = cluster.KMeans(3, random_state=2).fit(ROWS)
    np.testing.assert_array_equal(column(out, "cluster"), theirs.labels_)
    nearest = theirs.transform(ROWS).min(1)
    np.testing.assert_allclose(column(out, "distance"), nearest, rtol=1e-5)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["tiles_of_clusters"] == np.bincount(theirs.labels_).tolist()
    assert summary["inertia"] == pytest.approx(theirs.inertia_)
    assert has_picture(out / "clusters.png")
    places = [[int(row["x"]), int(row["y"])] for row in read_rows(out / "tiles" / "a.csv")]
    assert places == FeatureFile.open(features / "a.h5").coords().tolist()
    assert "x" not in read_rows(out / "tiles" / "f.csv")[0], "this one has no places"
    drawn = json.loads((out / "geojson" / "a.geojson").read_text())["features"]
    assert len(drawn) == 40
    assert drawn[8]["geometry"]["coordinates"][0][0] == [64, 64]
    assert drawn[8]["geometry"]["coordinates"][0][2] == [128, 128]
    named = [one["properties"]["classification"]["name"] for one in drawn]
    assert named == [f"cluster {k}" for k in theirs.labels_[:40]]
    again = tmp_path / "again"
    run("kmeans", features / "c.h5", "--apply", out / "model.npz", "--out", again)
    assert read_rows(again / "tiles" / "c.csv") == read_rows(out / "tiles" / "c.csv")
    assert not (again / "model.npz").exists()


def test_pca_and_tsvd(features, tmp_path):
    (tmp_path / "labels.csv").write_text("slide,site\na.svs,x\nc,y\ne.tiff,\nother,z\n")
    labels = ("--labels", tmp_path / "labels.csv", "--column", "site")
    run("pca", features, "-n", 3, *labels, "--out", tmp_path / "pca")
    run("tsvd", features, "-n", 2, "--out", tmp_path / "tsvd")
    theirs = {
        "pca": decomposition.PCA(3, svd_solver="full").fit_transform(ROWS),
        "tsvd": decomposition.TruncatedSVD(2, algorithm="arpack").fit(ROWS).transform(ROWS),
    }
    for name, values in theirs.items():
        for k in range(values.shape[1]):
            found = column(tmp_path / name, f"component_{k + 1}")
            np.testing.assert_allclose(found, values[:, k], rtol=1e-4, atol=1e-5)
        assert has_picture(tmp_path / name / "components.png")


@pytest.mark.parametrize("level", ["slide", "tile"])
def test_ridge_predicts_slides_that_were_held_out(features, tmp_path, level):
    lines = ["slide,age,patient", "a,50,p", "c,61.5,q", "d,48,q", "e,70,r", "f,,s", "b,44,s"]
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    words = ("--labels", tmp_path / "labels.csv", "--target", "age", "--group", "patient")
    out = tmp_path / "out"
    run("ridge", features, *words, "--level", level, "--folds", 3, "--alphas", 2, "--out", out)
    names, ages = ["a", "c", "d", "e"], np.array([50, 61.5, 48, 70])
    means = np.stack([FEATURES[name].astype(float).mean(0) for name in names])
    rows, true = means, ages
    of = np.arange(4)
    if level == "tile":
        rows = np.concatenate([FEATURES[name] for name in names]).astype(float)
        of = np.repeat(of, [SIZES[name] for name in names])
        true = ages[of]
    found = {row["slide"]: row for row in read_rows(out / "slides.csv")}
    patients = np.array([0, 1, 1, 2])
    for k, name in enumerate(names):
        rest = patients[of] != patients[k]
        model = linear_model.Ridge(2).fit(rows[rest], true[rest])
        assert float(found[name]["predicted_held_out"]) == pytest.approx(
            model.predict(means[k : k + 1])[0], rel=1e-5
        )
    model = linear_model.Ridge(2).fit(rows, true)
    np.testing.assert_allclose(column(out, "predicted"), model.predict(ROWS), rtol=1e-4)
    assert found["f"]["true"] == found["f"]["predicted_held_out"] == ""
    assert has_picture(out / "predicted.png")
    run("ridge", features, "--apply", out / "model.npz", "--out", tmp_path / "again")
    np.testing.assert_array_equal(column(tmp_path / "again", "predicted"), column(out, "predicted"))


@pytest.mark.parametrize("names", ["x y x z y", "x y x y y"])
def test_ridge_predicts_classes_of_slides_that_were_held_out(features, tmp_path, names):
    slides, grades = ["a", "c", "d", "e", "f"], names.split()
    lines = [f"{slide}.svs,{grade},p{slide}" for slide, grade in zip(slides, grades, strict=True)]
    (tmp_path / "labels.csv").write_text("\n".join(["slide,grade,patient", *lines, "b,x,q"]))
    words = ("--labels", tmp_path / "labels.csv", "--target", "grade", "--classes")
    out = tmp_path / "out"
    run("ridge", features, *words, "--folds", 5, "--alphas", 2, "--out", out)
    means = np.stack([FEATURES[name].astype(float).mean(0) for name in slides])
    found = {row["slide"]: row for row in read_rows(out / "slides.csv")}
    for k, name in enumerate(slides):
        rest = np.arange(5) != k
        model = linear_model.RidgeClassifier(2).fit(means[rest], np.array(grades)[rest])
        assert found[name]["true"] == grades[k]
        assert found[name]["predicted_held_out"] == model.predict(means[k : k + 1])[0]
        if len(set(grades)) == 2:
            score = model.decision_function(means[k : k + 1])[0]
            assert float(found[name]["score_y"]) == pytest.approx(score, rel=1e-4)
    model = linear_model.RidgeClassifier(2).fit(means, grades)
    told = [r["predicted"] for slide in SIZES for r in read_rows(out / "tiles" / f"{slide}.csv")]
    assert told == model.predict(ROWS).tolist()
    summary = json.loads((out / "summary.json").read_text())
    right = [found[name]["predicted_held_out"] == found[name]["true"] for name in slides]
    assert summary["accuracy"] == pytest.approx(np.mean(right))
    assert has_picture(out / "predicted.png")
    run("ridge", features, "--apply", out / "model.npz", *words, "--out", tmp_path / "again")
    again = read_rows(tmp_path / "again" / "slides.csv")
    assert [row["predicted"] for row in again] == [
        found[row["slide"]]["predicted"] for row in again
    ]


def test_neighbours_of_all_tiles(features, tmp_path):
    out = tmp_path / "out"
    run("neighbours", features, "--all", "-k", 3, "--metric", "euclidean", "--out", out)
    names = [(name, row) for name, n in SIZES.items() for row in range(n)]
    theirs = neighbors.NearestNeighbors(n_neighbors=3, algorithm="brute").fit(ROWS)
    distances, indices = theirs.kneighbors()
    found = [row for slide in SIZES for row in read_rows(out / "neighbours" / f"{slide}.csv")]
    assert len(found) == len(names)
    for k in range(3):
        near = [(row[f"slide_{k + 1}"], int(row[f"row_{k + 1}"])) for row in found]
        assert near == [names[index] for index in indices[:, k]]
        far = [float(row[f"distance_{k + 1}"]) for row in found]
        np.testing.assert_allclose(far, distances[:, k], rtol=1e-5)
    assert found[8]["x"] == "64"
    summary = json.loads((out / "summary.json").read_text())
    same = [names[k][0] == names[j][0] for k, row in enumerate(indices) for j in row]
    assert summary["neighbours_in_own_slide"] == pytest.approx(np.mean(same))
    pairs = sum(n * (n - 1) for n in SIZES.values()) / (len(names) * (len(names) - 1))
    assert summary["neighbours_in_own_slide_by_chance"] == pytest.approx(pairs)
    assert not (out / "neighbours.csv").exists()


def test_a_tile_is_not_its_own_neighbour_where_others_are_the_same(tmp_path):
    (tmp_path / "in").mkdir()
    write_features(tmp_path / "in" / "a.h5", np.ones((6, 3), np.float32), None)
    run("neighbours", tmp_path / "in", "--all", "-k", 2, "--out", tmp_path / "out")
    found = read_rows(tmp_path / "out" / "neighbours" / "a.csv")
    near = [(int(row["row_1"]), int(row["row_2"])) for row in found]
    assert near == [(1, 2), (0, 2), (0, 1), (0, 1), (0, 1), (0, 1)]


def test_neighbours_of_tiles(features, tmp_path):
    out = tmp_path / "out"
    run("neighbours", features, "--query", "c:3", "f:0", "-k", 4, "--out", out)
    names = [(name, row) for name, n in SIZES.items() for row in range(n)]
    theirs = neighbors.NearestNeighbors(metric="cosine", algorithm="brute").fit(ROWS)
    distances, indices = theirs.kneighbors(ROWS[[43, 99]])
    found = read_rows(out / "neighbours.csv")
    wanted = [names[k] for row in indices for k in row[1:]]
    assert [(row["slide"], int(row["row"])) for row in found] == wanted
    np.testing.assert_allclose(
        [float(row["distance"]) for row in found], distances[:, 1:].ravel(), rtol=1e-4, atol=1e-7
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pca", "--column", "site"], "--labels and --column must be used together"),
        (["tsvd", "-n", "0.5"], "tsvd needs a number of components, got 0.5"),
        (["ridge"], "ridge needs --labels CSV --target NAME"),
        (["neighbours"], "neighbours needs --query SLIDE:ROW ..., or --all for every"),
        (["neighbours", "--query", "x:1"], "--query x: no features of this slide"),
        (["neighbours", "--query", "d:1"], "--query d:1: the slide has rows 0 to 0"),
        (["neighbours", "--query", "a:1", "-k", "111"], "more than the 110 other tiles"),
        (["kmeans", "--apply", "nowhere.npz"], "nowhere.npz: no such file"),
    ],
)
def test_refusals(words, message, features, tmp_path, capsys):
    assert main([words[0], str(features), *words[1:], "--out", str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err


def test_options_that_are_gone_are_refused(features, tmp_path, capsys):
    for word, value in (("--solver", "randomized"), ("--device", "cuda")):
        with pytest.raises(SystemExit):
            main(["pca", str(features), word, value, "--out", str(tmp_path / "out")])
        assert "are exact and run on CPUs only; leave it out" in capsys.readouterr().err


def test_a_bad_tile_is_named_by_file_and_row(tmp_path, capsys):
    rows = np.ones((9, 4), np.float32)
    write_features(tmp_path / "good.h5", rows, None)
    rows[7, 2] = np.nan
    write_features(tmp_path / "poor.h5", rows, None)
    assert main(["pca", str(tmp_path), "-n", "1", "--out", str(tmp_path / "out")]) == 1
    assert f"{tmp_path / 'poor.h5'}: row 7, column 2, is nan" in capsys.readouterr().err


def test_labels_are_checked(features, tmp_path, capsys):
    for text, message in [
        ("slide,age\na,50\nc,old\nd,3\n", "age of slide 'c' is 'old', expected a finite number"),
        ("slide,years\na,50\n", "has no column age; its columns are slide, years"),
        ("slide,age\na,50\na.svs,50\n", "'a' and 'a.svs' both match slide 'a'"),
        ("slide,age\nx,50\n", "has none of the 6 slides with features, such as 'a'"),
        ("slide,age\na,50\nc,51\n", "2 slides with features have a number in age"),
    ]:
        path = tmp_path / "labels.csv"
        path.write_text(text)
        words = ["ridge", str(features), "--labels", str(path), "--target", "age"]
        assert main([*words, "--out", str(tmp_path / "out")]) == 1
        assert message in capsys.readouterr().err


def test_nothing_is_written_over(features, tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["pca", str(features), "--out", str(tmp_path)]) == 1
    assert "is not empty: use a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
