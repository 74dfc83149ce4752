"""Methods of `spatialdl-analyze`: fit a model, write tables, draw pictures."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from spatialdl.analysis import options as names
from spatialdl.analysis import pictures
from spatialdl.analysis.cohort import Cohort, Columns, Sampled, tile_span
from spatialdl.analysis.columns import as_numbers, read_columns
from spatialdl.analysis.decomposition import PCA, TruncatedSVD
from spatialdl.analysis.kmeans import KMeans
from spatialdl.analysis.neighbour_tables import place_of, write_neighbours
from spatialdl.analysis.neighbours import NearestNeighbors
from spatialdl.analysis.pictures import SlideMap
from spatialdl.analysis.rows import FileRows
from spatialdl.analysis.saved_models import load_model, save_model
from spatialdl.analysis.slide_pictures import SlidePictures
from spatialdl.data.feature_file import FeatureFile
from spatialdl.data.saving import save_table
from spatialdl.predicting.geojson import colour_of, save_geojson

MODEL, TABLES = "model.npz", "tiles"
Summary = dict[str, Any]


def learned(
    options: argparse.Namespace, cohort: Cohort, make: Callable[[], Any], kinds: tuple[type, ...]
) -> Any:
    """Load a model, or fit one to all rows and save it on rank 0."""
    ranks = cohort.ranks
    if options.apply is not None:
        model = ranks.together(lambda: _loaded(options, kinds))
        if model.n_features_in_ != cohort.width:
            raise ValueError(
                f"{options.apply} was fitted on {model.n_features_in_} features per tile, but "
                f"these files have {cohort.width}"
            )
        return model
    model = make()
    with cohort.rows() as rows:
        model.fit(rows)
    ranks.on_first(lambda: save_model(options.out / MODEL, model))
    return model


def _loaded(options: argparse.Namespace, kinds: tuple[type, ...]) -> Any:
    model = load_model(options.apply, device=options.device)
    if not isinstance(model, kinds):
        raise ValueError(
            f"{options.apply} is a {type(model).__name__}, which {options.method} cannot apply"
        )
    return model


# --- clusters


def cluster(options: argparse.Namespace, cohort: Cohort) -> Summary:
    """Cluster all tiles: a table per slide, maps, GeoJSON."""
    ranks = cohort.ranks
    slides = ranks.together(lambda: SlidePictures(options.slides))
    model = learned(options, cohort, lambda: _kmeans(options, cohort), (KMeans,))
    count = len(model.cluster_centers_)
    shown = [k for k, file in enumerate(cohort.files) if file.has_coords and file.tiles]
    shown = shown[: max(0, options.maps)]
    totals = np.zeros(count, np.int64)

    def columns(rows: FileRows) -> Columns:
        distances = model.transform(rows)
        clusters = distances.argmin(1)
        totals[:] += np.bincount(clusters, minlength=count)
        return {"cluster": clusters, "distance": distances.min(1, initial=np.inf)}

    def outline(file: FeatureFile, every: Sampled) -> None:
        if every.coords is not None:
            features = _boxes(every, tile_span(file, every.coords))
            save_geojson(options.out / "geojson" / f"{file.slide}.geojson", features)

    if options.geojson:
        (options.out / "geojson").mkdir(exist_ok=True)
    found = cohort.write_tables(
        options.out / TABLES, columns, whole=shown, also=outline if options.geojson else None
    )
    every = sum(ranks.comm.allgather(totals))
    ranks.on_first(lambda: _draw_maps(options, cohort, found, slides, count))
    learned_now = {} if options.apply else {"inertia": model.inertia_, "iterations": model.n_iter_}
    return {"tiles_of_clusters": every.tolist(), **learned_now, **_unreadable(slides)}


def _kmeans(options: argparse.Namespace, cohort: Cohort) -> KMeans:
    return KMeans(
        options.clusters,
        n_init=options.n_init,
        max_iter=options.max_iter,
        random_state=options.seed,
        comm=cohort.ranks.comm,
        device=options.device,
    )


def _draw_maps(
    options: argparse.Namespace,
    cohort: Cohort,
    found: list[Sampled],
    slides: SlidePictures,
    count: int,
) -> None:
    maps = []
    for one in found:
        file = cohort.files[one.slide]
        if one.coords is None:
            continue
        picture, scale = slides.overview(file.slide) or (None, 1.0)
        span = tile_span(file, one.coords)
        maps.append(SlideMap(file.slide, one.coords, one.values["cluster"], span, picture, scale))
    if maps:
        pictures.draw_maps(options.out / "clusters.png", maps, count)


def _boxes(every: Sampled, span: float) -> Iterator[dict[str, Any]]:
    """Tiles as GeoJSON features for QuPath."""
    assert every.coords is not None  # checked by the caller
    side = round(span)
    for (x, y), cluster in zip(
        every.coords.tolist(), every.values["cluster"].tolist(), strict=True
    ):
        ring = [(x, y), (x + side, y), (x + side, y + side), (x, y + side), (x, y)]
        kind = {"name": f"cluster {cluster}", "color": colour_of(cluster)}
        yield {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": [ring]},
            "properties": {"objectType": "tile", "classification": kind},
        }


def _unreadable(slides: SlidePictures) -> Summary:
    return {"slides_not_shown": slides.unreadable} if slides.unreadable else {}


# --- projections


def project(options: argparse.Namespace, cohort: Cohort) -> Summary:
    """Project all tiles: a table per slide, and a picture of the first two components."""
    ranks, files = cohort.ranks, cohort.files
    slides = [file.slide for file in files]
    labels = ranks.together(
        lambda: read_columns(options.labels, slides, [options.column]) if options.labels else None
    )
    model = learned(options, cohort, lambda: _projection(options, cohort), (PCA, TruncatedSVD))

    def columns(rows: FileRows) -> Columns:
        values = model.transform(rows)
        return {f"component_{k + 1}": values[:, k] for k in range(values.shape[1])}

    found = cohort.write_tables(options.out / TABLES, columns, samples=options.points)
    ratios = model.explained_variance_ratio_

    def draw() -> None:
        firsts = [f"component_{k + 1}" for k in range(min(2, len(ratios)))]
        points = [np.stack([one.values[name] for name in firsts], 1) for one in found]
        together = np.concatenate(points)
        if together.shape[1] == 1:
            together = np.concatenate([together, np.zeros_like(together)], 1)
        groups = [slides[one.slide] for one, part in zip(found, points, strict=True) for _ in part]
        if labels is not None:
            groups = [labels.get(slide, {}).get(options.column, "") for slide in groups]
        numbers = as_numbers(groups) if labels is not None else None
        if numbers is not None and len(set(groups)) <= 5:
            numbers = None  # class labels 0, 1, ...
        titles = [f"component {k + 1} ({100 * r:.1f} % of variance)" for k, r in enumerate(ratios)]
        pictures.draw_projection(
            options.out / "components.png",
            together,
            groups,
            numbers,
            (titles[0], titles[1] if len(titles) > 1 else ""),
            options.column or "slide",
        )

    ranks.on_first(draw)
    return {"explained_variance_ratio": ratios.tolist(), "components": len(ratios)}


def _projection(options: argparse.Namespace, cohort: Cohort) -> PCA | TruncatedSVD:
    seed, comm, device = options.seed, cohort.ranks.comm, options.device
    if options.method == names.PCA:
        solver = {"exact": "covariance_eigh"}.get(options.solver, options.solver)
        return PCA(
            options.components, svd_solver=solver, random_state=seed, comm=comm, device=device
        )
    return TruncatedSVD(
        options.components, algorithm=options.solver, random_state=seed, comm=comm, device=device
    )


# --- neighbours


def search(options: argparse.Namespace, cohort: Cohort) -> Summary:
    """Search the nearest tiles of query tiles: a table, and their pictures."""
    ranks = cohort.ranks
    slides = ranks.together(lambda: SlidePictures(options.slides))
    wanted = options.neighbours
    queries: Any = ranks.together(lambda: [] if ranks.rank else _queried(options, cohort))
    model = NearestNeighbors(metric=options.metric, comm=ranks.comm, device=options.device)
    with cohort.rows() as rows:
        model.fit(rows)
    summary: Summary = {"neighbours": wanted, "metric": options.metric}
    if options.all:
        summary |= write_neighbours(options.out / "neighbours", cohort, model, wanted)
    if not options.query:
        return summary
    distances, indices = model.kneighbors(queries, min(wanted + 1, cohort.tiles))

    def write() -> None:
        lines, shown = [], []
        for (slide, row), near, far in zip(options.query, indices, distances, strict=True):
            numbers, rows = place_of(cohort, near)
            names = [cohort.files[number].slide for number in numbers.tolist()]
            each = list(zip(names, rows.tolist(), far.tolist(), strict=True))
            of_query = [one for one in each if one[:2] != (slide, row)][:wanted]
            shown.append([(slide, row, 0.0), *of_query])
            for place, (name, at, distance) in enumerate(of_query, 1):
                x, y = _place(cohort, name, at)
                lines.append([f"{slide}:{row}", place, name, at, x, y, f"{distance:.6g}"])
        head = ("query", "neighbour", "slide", "row", "x", "y", "distance")
        save_table(options.out / "neighbours.csv", head, lines)
        if slides:
            tiles = [
                [_shown(cohort, slides, *one, is_query=not k) for k, one in enumerate(line)]
                for line in shown
            ]
            pictures.draw_tiles(options.out / "neighbours.png", tiles)

    ranks.on_first(write)
    return {**summary, **_unreadable(slides)}


def _queried(options: argparse.Namespace, cohort: Cohort) -> npt.NDArray[Any]:
    if options.neighbours > cohort.tiles - 1:
        raise ValueError(
            f"--neighbours {options.neighbours} is more than the {cohort.tiles - 1} other tiles"
        )
    found = []
    for slide, row in options.query:
        file = _file(cohort, slide)
        if row >= file.tiles:
            raise ValueError(f"--query {slide}:{row}: the slide has rows 0 to {file.tiles - 1}")
        found.append(file.read(row, row + 1)[0])
    return np.stack(found) if found else np.empty((0, cohort.width))


def _file(cohort: Cohort, slide: str) -> FeatureFile:
    for file in cohort.files:
        if file.slide == slide:
            return file
    raise ValueError(
        f"--query {slide}: no features of this slide; slides: "
        f"{', '.join(file.slide for file in cohort.files[:5])}"
    )


def _place(cohort: Cohort, slide: str, row: int) -> tuple[Any, Any]:
    file = _file(cohort, slide)
    if not file.has_coords:
        return "", ""
    x, y = file.coords()[row].tolist()
    return x, y


def _shown(
    cohort: Cohort, slides: SlidePictures, slide: str, row: int, distance: float, is_query: bool
) -> tuple[str, npt.NDArray[np.uint8] | None]:
    file = _file(cohort, slide)
    name = slide if len(slide) <= 20 else f"{slide[:9]}…{slide[-10:]}"
    how = "query" if is_query else f"distance {distance:.2g}"
    caption = f"{name}\nrow {row}, {how}"
    if not file.has_coords:
        return caption, None
    coords = file.coords()
    x, y = coords[row].tolist()
    return caption, slides.tile(slide, (x, y), tile_span(file, coords))
