"""Methods of `spatialdl-analyze` on tiles: fit a model, write tables, draw pictures."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spatialdl.common.files import save_table
from spatialdl.data.feature_file import FeatureFile
from spatialdl.inference.analysis import pictures
from spatialdl.inference.analysis.cohort import Cohort, Columns, Sampled
from spatialdl.inference.analysis.components import PCA, TruncatedSVD
from spatialdl.inference.analysis.kmeans import KMeans
from spatialdl.inference.analysis.neighbours import NearestNeighbors
from spatialdl.inference.analysis.pictures import SlideMap, SlidePictures
from spatialdl.inference.analysis.rows import FilePart, FileRows, load_model, save_model
from spatialdl.inference.predicting.bags import tile_span
from spatialdl.inference.predicting.loop import agreeing
from spatialdl.inference.predicting.polygons import class_features, save_geojson

MODEL, TABLES = "model.npz", "tiles"
_SPAN = 256.0  # of a tile whose size is unknown
Summary = dict[str, Any]
Array = npt.NDArray[Any]


def learned(
    options: argparse.Namespace, cohort: Cohort, make: Callable[[], Any], kinds: tuple[type, ...]
) -> Any:
    """Load a model, or fit one to all rows and save it on rank 0."""
    if options.apply is not None:
        with agreeing(cohort.comm):
            model = load_model(options.apply, kinds, options.method)
            if model.n_features_in_ != cohort.width:
                raise ValueError(
                    f"{options.apply} was fitted on {model.n_features_in_} features per tile, but "
                    f"these files have {cohort.width}"
                )
        return model
    model = make()
    with cohort.rows() as rows:
        model.fit(rows)
    with agreeing(cohort.comm):
        if cohort.comm.rank == 0:
            save_model(options.out / MODEL, model)
    return model


def _slide_pictures(options: argparse.Namespace, cohort: Cohort) -> SlidePictures:
    with agreeing(cohort.comm):
        return SlidePictures(options.slides)


# --- clusters


def cluster(options: argparse.Namespace, cohort: Cohort) -> Summary:
    """Cluster all tiles: a table per slide, maps, GeoJSON."""
    slides = _slide_pictures(options, cohort)
    model = learned(
        options,
        cohort,
        lambda: KMeans(
            options.clusters,
            n_init=options.n_init,
            max_iter=options.max_iter,
            random_state=options.seed,
            comm=cohort.comm,
        ),
        (KMeans,),
    )
    count = len(model.cluster_centers_)
    drawable = [k for k, file in enumerate(cohort.files) if file.has_coords and file.tiles]
    shown = drawable[: max(0, options.maps)]
    totals = np.zeros(count, np.int64)

    def columns(rows: FileRows) -> Columns:
        distances = model.transform(rows)
        clusters = distances.argmin(1)
        totals[:] += np.bincount(clusters, minlength=count)
        return {"cluster": clusters, "distance": distances.min(1, initial=np.inf)}

    def each(number: int, every: Sampled) -> Sampled | None:
        file = cohort.files[number]
        if options.geojson and every.coords is not None:
            folder = options.out / "geojson"
            folder.mkdir(exist_ok=True)
            clusters, names = every.values["cluster"], [f"cluster {k}" for k in range(count)]
            places = every.coords - slides.scanned_from(file.slide)
            boxes = class_features(places, _span(file, every.coords), clusters, names)
            save_geojson(folder / f"{file.slide}.geojson", boxes)
        return every if number in shown else None

    found = cohort.write_tables(options.out / TABLES, columns, each)
    every = sum(cohort.comm.allgather(totals))
    maps = []
    with agreeing(cohort.comm):
        for one in found:
            file = cohort.files[one.slide]
            if one.coords is not None:
                picture, scale = slides.overview(file.slide) or (None, 1.0)
                clusters, span = one.values["cluster"], _span(file, one.coords)
                maps.append(SlideMap(file.slide, one.coords, clusters, span, picture, scale))
        if maps:
            pictures.draw_maps(options.out / "clusters.png", maps, count)
    learned_now = {} if options.apply else {"inertia": model.inertia_, "iterations": model.n_iter_}
    return {"tiles_of_clusters": every.tolist(), **learned_now, **slides.summary()}


def _span(file: FeatureFile, coords: npt.NDArray[np.int64]) -> float:
    return tile_span(file.attributes, coords) or _SPAN


# --- projections


def project(options: argparse.Namespace, cohort: Cohort) -> Summary:
    """Project all tiles: a table per slide, and a picture of the first two components."""
    labels = None
    with agreeing(cohort.comm):
        if options.labels:
            labels = cohort.read_columns(options.labels, [options.column])
    kind = PCA if options.method == "pca" else TruncatedSVD
    model = learned(
        options, cohort, lambda: kind(options.components, comm=cohort.comm), (PCA, TruncatedSVD)
    )

    def columns(rows: FileRows) -> Columns:
        return {f"component_{k}": values for k, values in enumerate(model.transform(rows).T, 1)}

    step = -(-cohort.tiles // options.points)  # of evenly spaced tiles of all slides
    firsts = np.cumsum([0, *(file.tiles for file in cohort.files)])

    def each(number: int, every: Sampled) -> Sampled:
        first = int(-firsts[number] % step)
        return every._replace(values={k: v[first::step] for k, v in every.values.items()})

    found = cohort.write_tables(options.out / TABLES, columns, each)
    ratios = model.explained_variance_ratio_
    with agreeing(cohort.comm):
        if cohort.comm.rank == 0:
            path = options.out / "components.png"
            _draw_points(path, cohort, found, ratios, labels, options.column)
    return {"explained_variance_ratio": ratios.tolist(), "components": len(ratios)}


def _draw_points(
    path: Path,
    cohort: Cohort,
    found: list[Sampled],
    ratios: Array,
    labels: dict[str, dict[str, str]] | None,
    column: str | None,
) -> None:
    points = [np.stack([*one.values.values()][:2], 1) for one in found]
    together = np.concatenate(points)
    if together.shape[1] == 1:
        together = np.pad(together, ((0, 0), (0, 1)))
    groups = [
        cohort.slides[one.slide] for one, rows in zip(found, points, strict=True) for _ in rows
    ]
    numbers = None
    if labels is not None:
        groups = [labels.get(slide, {}).get(column or "", "") for slide in groups]
        if len(set(groups)) > 5:  # fewer are class labels 0, 1, ...
            numbers = _numbers(groups)
    titles = [f"component {k + 1} ({100 * r:.1f} % of variance)" for k, r in enumerate(ratios)]
    both = titles[0], titles[1] if len(titles) > 1 else ""
    pictures.draw_projection(path, together, groups, numbers, both, column or "slide")


def _numbers(texts: list[str]) -> npt.NDArray[np.float64] | None:
    """Parse numbers, with NaN for an empty text; None if any text is not a number."""
    try:
        return np.array([float(text) if text else np.nan for text in texts])
    except ValueError:
        return None


# --- neighbours


def search(options: argparse.Namespace, cohort: Cohort) -> Summary:
    """Search the nearest tiles of query tiles: a table, and their pictures."""
    comm, wanted = cohort.comm, options.neighbours
    slides = _slide_pictures(options, cohort)
    queries: Any = []
    with agreeing(comm):
        if comm.rank == 0:
            queries = _queried(options, cohort)
    model = NearestNeighbors(metric=options.metric, comm=comm)
    with cohort.rows() as rows:
        model.fit(rows)
    summary: Summary = {"neighbours": wanted, "metric": options.metric}
    if options.all:
        summary |= _search_all(options.out / "neighbours", cohort, model, wanted)
    if not options.query:
        return summary
    distances, indices = model.kneighbors(queries, min(wanted + 1, cohort.tiles))
    lines, shown = [], []
    with agreeing(comm):
        for (slide, row), near, far in zip(options.query, indices, distances, strict=False):
            numbers, rows_ = _place_of(cohort, near)
            each = zip(numbers.tolist(), rows_.tolist(), far.tolist(), strict=True)
            itself = cohort.slides.index(slide), row
            of_query = [one for one in each if one[:2] != itself][:wanted]
            shown.append(
                [(*itself, "query"), *((k, at, f"distance {d:.2g}") for k, at, d in of_query)]
            )
            for place, (k, at, distance) in enumerate(of_query, 1):
                file = cohort.files[k]
                x, y = file.coords()[at].tolist() if file.has_coords else ("", "")
                lines.append([f"{slide}:{row}", place, file.slide, at, x, y, f"{distance:.6g}"])
        if comm.rank == 0:
            head = ("query", "neighbour", "slide", "row", "x", "y", "distance")
            save_table(options.out / "neighbours.csv", head, lines)
        if comm.rank == 0 and slides:
            tiles = [
                [_tile(cohort.files[k], at, what, slides) for k, at, what in row] for row in shown
            ]
            pictures.draw_tiles(options.out / "neighbours.png", tiles)
    return {**summary, **slides.summary()}


def _queried(options: argparse.Namespace, cohort: Cohort) -> Array:
    if options.neighbours > cohort.tiles - 1:
        raise ValueError(
            f"--neighbours {options.neighbours} is more than the {cohort.tiles - 1} other tiles"
        )
    found = []
    for slide, row in options.query:
        if slide not in cohort.slides:
            raise ValueError(
                f"--query {slide}: no features of this slide; slides: "
                f"{', '.join(cohort.slides[:5])}"
            )
        file = cohort.files[cohort.slides.index(slide)]
        if row >= file.tiles:
            raise ValueError(f"--query {slide}:{row}: the slide has rows 0 to {file.tiles - 1}")
        found.append(file.read(row, row + 1)[0])
    return np.stack(found) if found else np.empty((0, cohort.width))


def _tile(
    file: FeatureFile, row: int, what: str, slides: SlidePictures
) -> tuple[str, npt.NDArray[np.uint8] | None]:
    """Caption and picture of a tile."""
    name = file.slide if len(file.slide) <= 20 else f"{file.slide[:9]}…{file.slide[-10:]}"
    caption = f"{name}\nrow {row}, {what}"
    if not file.has_coords:
        return caption, None
    coords = file.coords()
    x, y = coords[row].tolist()
    return caption, slides.tile(file.slide, (x, y), _span(file, coords))


def _place_of(cohort: Cohort, indices: Array) -> tuple[Array, Array]:
    """Map indices among the tiles of all slides to slide indices and rows in them."""
    starts = np.cumsum([0, *(file.tiles for file in cohort.files)])
    numbers = np.searchsorted(starts[1:], indices, side="right")
    return numbers, indices - starts[numbers]


def _search_all(folder: Path, cohort: Cohort, model: NearestNeighbors, wanted: int) -> Summary:
    """Write SLIDE.csv for each slide, with a line per tile; collective.

    Args:
        folder: output folder.
        model: fitted on the tiles of all slides, in their order.
        wanted: number of neighbours per tile, without the tile itself.

    Returns:
        Share of neighbours from the tile's own slide, and its value by chance; on all ranks.
    """
    own, sizes = cohort.own_slides(), np.array([file.tiles for file in cohort.files])
    queries = [FilePart(cohort.files[k], 0, cohort.files[k].tiles) for k in own]
    distances, indices = model.kneighbors(
        FileRows(queries, cohort.width, keep=0), min(wanted + 1, cohort.tiles)
    )
    starts = np.cumsum([0, *sizes])
    itself = [n for k in own for n in range(starts[k], starts[k + 1])]
    dropped = indices == np.array(itself, np.int64)[:, None]
    dropped[~dropped.any(1), -1] = True  # ties pushed the tile itself out
    shape = len(indices), max(0, indices.shape[1] - 1)
    distances, indices = distances[~dropped].reshape(shape), indices[~dropped].reshape(shape)
    first = same = 0
    with agreeing(cohort.comm):
        folder.mkdir(parents=True, exist_ok=True)
        numbers, rows = _place_of(cohort, indices)
        for k in own:
            place = slice(first, first := first + cohort.files[k].tiles)
            _write_nearest(folder, cohort, k, numbers[place], rows[place], distances[place])
            same += int((numbers[place] == k).sum())
    every, others = cohort.tiles, sizes.astype(np.float64) - 1
    return {
        "neighbours_in_own_slide": sum(cohort.comm.allgather(same)) / (every * wanted),
        "neighbours_in_own_slide_by_chance": float(
            (sizes * others).sum() / (every * max(1, every - 1))
        ),
    }


def _write_nearest(
    folder: Path, cohort: Cohort, number: int, slides: Array, rows: Array, distances: Array
) -> None:
    file = cohort.files[number]
    coords = file.coords().tolist() if file.has_coords else [()] * file.tiles
    head = ["row", *(("x", "y") if file.has_coords else ())]
    for k in range(1, distances.shape[1] + 1):
        head += [f"slide_{k}", f"row_{k}", f"distance_{k}"]
    lines = []
    for row in range(file.tiles):
        near = zip(slides[row].tolist(), rows[row].tolist(), distances[row].tolist(), strict=True)
        cells = [cell for k, at, d in near for cell in (cohort.slides[k], at, f"{d:.6g}")]
        lines.append([row, *coords[row], *cells])
    save_table(folder / f"{file.slide}.csv", head, lines)
