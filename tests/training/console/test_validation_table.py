from __future__ import annotations

from spatialdl.training.console.validation_table import class_rows, confusion_rows, validation_table

CLASSES = {
    "loss": 0.5,
    "samples": 7,
    "accuracy": 0.25,
    "auroc": None,
    "recall_per_class": [0.5, None],
    "auroc_per_class": [1.0, 0.75],
    "confusion_matrix": [[1000, 2], [3, 4]],
}


def test_metrics_beside_those_before():
    before = {"loss": 2.0, "accuracy": 0.5, "auroc": None}
    lines = validation_table(CLASSES, 12, ["benign", "tumour"], before).splitlines()
    assert lines[0] == "validation after step 12, 7 samples"
    assert [line.split() for line in lines[1:5]] == [
        *(["now", "before"], ["loss", "0.5", "2"]),
        *(["accuracy", "25.0", "%", "50.0", "%"], ["AUROC", "-", "-"]),
    ]
    assert [line.split() for line in lines[6:9]] == [
        *(["recall", "AUROC"], ["benign", "50.0", "%", "100.0", "%"]),
        ["tumour", "-", "75.0", "%"],
    ]
    assert lines[-3:] == [
        "  true \\ predicted  benign  tumour",
        "  benign             1,000       2",
        "  tumour                 3       4",
    ]


def test_the_first_validation_has_none_before_it():
    found = {"loss": 2.0, "samples": 1, "rmse": 0.123456, "rmse_per_target": [0.123456]}
    lines = validation_table(found, 3, ["mpp"], None).splitlines()
    assert lines[0] == "validation after step 3, 1 sample"
    assert [line.split() for line in lines[1:3]] == [["loss", "2"], ["RMSE", "0.1235"]]
    assert lines[-1].split() == ["mpp", "0.1235"]


def test_many_classes_are_cut_short_and_pairs_left_out():
    count = 30
    found = {"dice": [0.5] * count, "confusion_matrix": [[1] * count] * count}
    assert class_rows(found, [])[-1] == ["... 10 more", ""]
    assert confusion_rows(found, []) == []


def test_what_is_undefined_or_of_labels_has_no_pairs():
    assert confusion_rows({"confusion_matrix": []}, []) == []
    assert confusion_rows({"confusion_matrix": [[[1, 0], [0, 1]]]}, ["a"]) == []
    assert class_rows({"recall_per_class": []}, []) == []


def test_pixels_told_to_be_no_class_have_a_column_if_there_are_any():
    assert confusion_rows({"confusion_matrix": [[5, 1, 0], [2, 6, 0]]}, ["a", "b"])[0][1:] == [
        *("a", "b")
    ]
    assert confusion_rows({"confusion_matrix": [[5, 1, 9], [2, 6, 0]]}, ["a", "b"])[1] == [
        *("a", "5", "1", "9")
    ]
