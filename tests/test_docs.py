"""What `pydoc` shows of the public names: every argument is told, every method says something."""

from __future__ import annotations

import inspect
import pydoc
import re

import pytest

import spatialdl
import spatialdl.data
import spatialdl.export
import spatialdl.models
import spatialdl.spatial.random
from spatialdl.inference import analysis

PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (spatialdl, spatialdl.bags, spatialdl.data, spatialdl.models)
    for name in module.__all__
    if name != "__version__"
}
PUBLIC["spatialdl.export.export"] = spatialdl.export.export
PUBLIC["spatialdl.spatial.random.keyed"] = spatialdl.random.keyed
ESTIMATORS = ("KMeans", "NearestNeighbors", "PCA", "Ridge", "RidgeCV", "RidgeClassifierCV")
ESTIMATORS += ("TruncatedSVD",)
PUBLIC |= {f"{analysis.__name__}.{name}": getattr(analysis, name) for name in ESTIMATORS}
MADE_BY_OTHERS = ("SpatialTensor", "ResNet", "ResNetV2")  # users call what returns them
CLASSES = {name: one for name, one in PUBLIC.items() if inspect.isclass(one)}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_argument_of_a_public_name_is_told(name):
    one = PUBLIC[name]
    text = inspect.getdoc(one)
    assert text
    assert text.splitlines()[0].rstrip().endswith((".", ",", ":"))
    if issubclass(one, Exception) if inspect.isclass(one) else False:
        return
    if name.rpartition(".")[2] in MADE_BY_OTHERS:
        return
    told = re.search(r"^(?:Args|Attributes):\n(.*?)(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    taken = [p for p in inspect.signature(one).parameters if p != "self"]
    heads = re.findall(r"^    (\w[\w, ]*):", told[1], re.MULTILINE) if told else []
    assert {word for head in heads for word in head.split(", ")} == set(taken)


@pytest.mark.parametrize("name", CLASSES)
def test_every_method_of_a_public_class_says_something(name):
    own = {
        key: value
        for key, value in vars(CLASSES[name]).items()
        if not key.startswith("_") and (callable(value) or isinstance(value, property))
    }
    silent = [key for key, value in own.items() if not inspect.getdoc(value) and key != "forward"]
    assert silent == []


def test_pydoc_shows_the_package_and_all_its_functions():
    text = pydoc.plain(pydoc.render_doc(spatialdl))
    for name in PUBLIC:
        module, _, word = name.rpartition(".")
        assert module != "spatialdl" or re.search(rf"^ *(class )?{word}\b", text, re.M), name
    assert "spatialdl.average_gradients(model, mesh)" in text
