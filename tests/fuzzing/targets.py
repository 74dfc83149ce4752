"""What is read in the child: each target makes valid inputs, and reads what was made of them."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import tifffile
import torch

from spatialdl.comm.single_process import SingleProcess
from spatialdl.common.files import load_json
from spatialdl.data.importing.clam import _opened
from spatialdl.data.samples import ShardInfo
from spatialdl.data.shards import ShardDataset
from spatialdl.data.tables import label_slides
from spatialdl.data.targets import read_targets
from spatialdl.data.writer import ShardWriter
from spatialdl.errors import CheckpointError, ShardError
from spatialdl.export import export
from spatialdl.inference.predicting.cutting import cutting_of
from spatialdl.inference.predicting.inputs import shard_inputs
from spatialdl.inference.predicting.network import Network
from spatialdl.inference.predicting.records import PredictionRecord
from spatialdl.inference.predicting.trained import find_trained
from spatialdl.slides.batch.finding_slides import read_labels
from spatialdl.slides.batch.record import PartRecord, SlideRecord, load_part, save_part
from spatialdl.slides.batch.report import TilingReport
from spatialdl.slides.finding.annotations import class_map, class_names, read_annotations
from spatialdl.slides.inspection import inspect, verify
from spatialdl.slides.pyramid import write_pyramid
from spatialdl.slides.reading.reader import Slide
from spatialdl.training.checkpoints.content import restore_random
from spatialdl.training.checkpoints.folder import SEAL, sealed
from spatialdl.training.checkpoints.reading import Checkpoint
from tests.fuzzing.child import Target
from tests.inference.predicting.runs import command, train


def pixels(rows: int, cols: int, seed: int = 0) -> Any:
    """uint8 (rows, cols, 3)."""
    return np.random.default_rng(seed).integers(0, 256, (rows, cols, 3), np.uint8)


def data_sets(folder: Path) -> list[Path]:
    """One of each kind: tiles with masks, striped regions, and tiles as JPEG, zstd and LZ4."""
    kinds: dict[str, dict[str, Any]] = {
        "tiles": {"codec": "raw", "mpp": 0.5},
        "regions": {"codec": "raw", "kind": "regions", "stripes": 2},
        **{codec: {"codec": codec, "mpp": 0.5} for codec in ("jpeg", "zstd", "lz4")},
    }
    note = {"overlap": 0, "program": "test"}
    for name, how in kinds.items():
        with ShardWriter(folder / name, ["a", "b"], made_with=note, **how) as out:
            for number, split in enumerate(("train", "train", "val")):
                image = pixels(20, 24, number)
                mask = None if name == "jpeg" else image[..., 0] % 2
                xy = (8 * number, 0)
                out.add(image, number % 2, split, slide=f"s{number % 2}", xy=xy, mask=mask)
    return [folder / name for name in kinds]


def read_all(path: Path) -> None:
    """Read a data set in every way there is, all of it and boxes."""
    data = ShardDataset(path)
    data.manifest.of_splits(data.splits[:1])
    shard_inputs(data, (8, 8), maps=False)
    for number in {0, len(data) // 2, len(data) - 1} if len(data) else ():
        rows, cols = data.image_size(number)
        data.read(number, (rows // 2, rows, 0, (cols + 1) // 2))
        data.read(number)
        if data.has_masks:
            data.read_mask(number, (0, rows, cols // 2, cols))
    data.close()


class ManifestTarget(Target):
    """manifest.json of each kind of data set."""

    names = "manifest.json"

    def __init__(self, folder: Path) -> None:
        self._sets = data_sets(folder)

    def valid(self) -> list[bytes]:
        return [(path / "manifest.json").read_bytes() for path in self._sets]

    def attempt(self, number: int, data: bytes) -> None:
        path = self._sets[number]
        (path / "manifest.json").write_bytes(data)
        inspect(path)
        try:
            read_all(path)
            verify(path)
        except ShardError as error:
            # of what the manifest says of the shards: they name the folder
            raise ShardError(f"{error} (manifest.json)") from error


class ShardTarget(Target):
    """A shard, of which the manifest says the length that it has."""

    names = "shard-00000.h5"

    def __init__(self, folder: Path) -> None:
        self._sets = data_sets(folder)
        self._manifests = [json.loads((path / "manifest.json").read_bytes()) for path in self._sets]
        self._valid = [(path / self.names).read_bytes() for path in self._sets]

    def valid(self) -> list[bytes]:
        return self._valid

    def attempt(self, number: int, data: bytes) -> None:
        path, manifest = self._sets[number], self._manifests[number]
        (path / self.names).write_bytes(data)
        manifest["shards"][0]["bytes"] = len(data)
        manifest["shards"][0]["sha256"] = hashlib.sha256(self._valid[number]).hexdigest()
        (path / "manifest.json").write_text(json.dumps(manifest))
        wrong: Exception | None = None
        for work in (
            partial(read_all, path),
            partial(verify, path),
            partial(_opened, [path / self.names]),
        ):
            try:
                work()
            except ShardError as error:
                wrong = error
        if wrong is not None:
            raise wrong


class CsvTarget(Target):
    """The tables that users write: labels of slides, targets, labels of CLAM."""

    names = "table.csv"

    def valid(self) -> list[bytes]:
        return [
            b"slide,label,split,mpp\na.svs,tumour,train,0.25\nb,normal,val,\nc d.svs,x,test,0.5\n",
            b"slide,er,pr\na.svs,1,0\nb.svs,1,\n",
            b"sample,age\n0,63.5\n1,71\n2,nan\n",
            b'slide_id,label,split\na,"tumour, large",train\nb,normal,val\n',
        ]

    def attempt(self, number: int, data: bytes) -> None:
        path = self._folder / self.names
        path.write_bytes(data)
        if number == 0:
            read_labels(path, [self._folder / name for name in ("a.svs", "b.svs", "c d.svs")])
        elif number == 3:
            label_slides(["a", "b"], path)
        else:
            table, _ = read_targets(path, binary=number == 1)
            table.match(["a.svs", "b.svs"] if table.key == "slide" else ["0", "1"])


class GeojsonTarget(Target):
    """Annotations as QuPath writes them."""

    names = "a.geojson"

    def valid(self) -> list[bytes]:
        outer = [[0, 0], [100, 0], [100, 80.5], [0, 80], [0, 0]]
        hole = [[10, 10], [20, 10], [20, 20], [10, 10]]
        kind = {"name": "Tumor", "color": [200, 0, 0]}
        features = [
            {
                "type": "Feature",
                "id": "PathAnnotationObject",
                "geometry": {"type": shape, "coordinates": coordinates},
                "properties": {"objectType": "annotation", "classification": kind},
            }
            for shape, coordinates in (
                ("Polygon", [outer, hole]),
                ("MultiPolygon", [[outer], [hole]]),
                ("Point", [5, 5]),
            )
        ]
        parts = {"type": "GeometryCollection", "geometries": [features[0]["geometry"]]}
        names = {"classification": {"names": ["Tumor", "Positive"]}}
        other = {"type": "Feature", "geometry": parts, "properties": names}
        documents = {"type": "FeatureCollection", "features": features}, [*features, other], other
        return [json.dumps(one).encode() for one in documents]

    def attempt(self, number: int, data: bytes) -> None:
        path = self._folder / self.names
        path.write_bytes(data)
        regions = [region.moved((3, -4)) for region in read_annotations(path)]
        class_names(regions)
        class_map(regions, (64, 48), 2.5)


class XmlTarget(GeojsonTarget):
    """Annotations as ASAP and ImageScope write them."""

    names = "a.xml"

    def valid(self) -> list[bytes]:
        asap = "".join(
            f'<Coordinate Order="{n}" X="{x}" Y="{y}"/>'
            for n, (x, y) in enumerate([(0, 0), (50.5, 0), (50, 40)])
        )
        aperio = '<Vertex X="0" Y="0"/><Vertex X="60" Y="0"/><Vertex X="60" Y="33.3"/>'
        return [
            '<?xml version="1.0"?><ASAP_Annotations><Annotations><Annotation Name="1" '
            f'Type="Polygon" PartOfGroup="Tumor"><Coordinates>{asap}</Coordinates></Annotation>'
            "</Annotations></ASAP_Annotations>".encode(),
            '<Annotations MicronsPerPixel="0.25"><Annotation Id="1" Name="Tumor"><Regions>'
            f'<Region Id="1" Type="0" NegativeROA="0"><Vertices>{aperio}</Vertices></Region>'
            f'<Region Id="2" Type="2"><Vertices>{aperio}</Vertices></Region>'
            "</Regions></Annotation></Annotations>".encode(),
        ]


def resealed(data: bytes) -> bytes:
    """A changed checkpoint.json with the checksum that goes with it, as anybody may write it."""
    with suppress(ValueError, TypeError, AttributeError, RecursionError):
        return sealed({k: v for k, v in json.loads(data).items() if k != SEAL}).encode()
    return data


class CheckpointTarget(Target):
    """checkpoint.json, and then safetensors files whose checksum it has, as predicting reads them.

    What somebody has changed has the right checksums: they are against damage.
    """

    names = "step-00000002"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        train(folder / "run", "model=wide_view", "model.width=2", "trainer.report=false")
        self._path = folder / "run" / "checkpoints" / self.names
        self._files = ["checkpoint.json", "stage-00.safetensors", "random.safetensors"]
        self._valid = [(self._path / name).read_bytes() for name in self._files]
        self._config = command("ckpt_path=x", "mpp=0.5")

    def valid(self) -> list[bytes]:
        return self._valid

    def _put(self, number: int, data: bytes) -> None:
        """Write a checkpoint of which one file was changed."""
        for name, whole in zip(self._files, self._valid, strict=True):
            (self._path / name).write_bytes(whole)
        name = self._files[number]
        if number == 0:
            data = resealed(data)
        else:
            content = json.loads(self._valid[0])
            digest = hashlib.sha256(data).hexdigest()
            content["files"][name] = {"bytes": len(data), "sha256": digest}
            (self._path / "checkpoint.json").write_bytes(resealed(json.dumps(content).encode()))
        (self._path / name).write_bytes(data)

    def attempt(self, number: int, data: bytes) -> None:
        self._put(number, data)
        trained = find_trained(str(self._path), SingleProcess())
        with Checkpoint(trained.path) as checkpoint:
            for key in checkpoint.names(""):
                checkpoint.shape(key)
                checkpoint.read(key)
            try:
                restore_random(checkpoint.random_states(0), torch.device("cpu"))
            except CheckpointError as error:
                raise CheckpointError(f"{self.names}: {error}") from error
        export(str(self._path), self._folder / "out.safetensors")
        try:
            cutting_of(self._config, trained)
            Network(trained, self._config, SingleProcess()).pipeline((32, 32))
        except ValueError as error:
            raise ValueError(f"{self.names}: {error}") from error


class RecordTarget(Target):
    """What a batch of slides, or predicting for them, has left of slides that are done."""

    def valid(self) -> list[bytes]:
        batch, digest = self._folder, hashlib.sha256(b"whole").hexdigest()
        (batch / "shard-00000.h5").write_bytes(b"whole")
        info = ShardInfo("shard-00000.h5", 5, digest, 1)
        part = PartRecord(info, [(3, 4, 1), (5, -6, None)], {"blur": [(1, 2)]}, [], "torn", 2, 0.5)
        report = TilingReport("a").to_json()
        SlideRecord("key", "a.svs", "train", [part], [info], None, report).save(batch, "a")
        save_part(batch, "key", part)
        places, values = np.arange(6).reshape(3, 2), np.ones((3, 2))
        PredictionRecord("a", "key", places, (8.0, 9.0), values, 1, [info.file]).save(batch)
        names = ("records/a.json", "part.json", "records/a.npz", "settings.json")
        self._paths = [batch / name for name in names]
        self._paths[3].write_text(json.dumps({"tile_size": 64, "mpp": [0.5]}))
        self._valid = [path.read_bytes() for path in self._paths]
        return self._valid

    def attempt(self, number: int, data: bytes) -> None:
        for path, whole in zip(self._paths, self._valid, strict=True):
            path.write_bytes(whole)
        self._paths[number].write_bytes(data)
        record = SlideRecord.load(self._folder, "a")
        if record is not None:
            record.is_whole(self._folder)
        load_part(self._folder, "key")
        PredictionRecord.load(self._folder, "a", "key")
        load_json(self._paths[3])


class SlideTarget(Target):
    """Slides: pyramids of TIFF, JPEG tiles or strips, PNG and JPEG."""

    names = "slide."

    def valid(self) -> list[bytes]:
        image, path = pixels(300, 280), self._folder / "made.tif"
        write_pyramid(path, [image], (300, 280), 0.5)
        found, small = [path.read_bytes()], image[:90, :70]
        said = "Aperio Image Library v11\n280x300 [0,0 280x300] (64x64)|AppMag = 20|MPP = 0.5"
        jpeg = {"compression": "jpeg", "photometric": "ycbcr", "description": said}
        ways: list[tuple[Any, dict[str, Any]]] = [
            (image, {"tile": (64, 64), "photometric": "rgb"}),
            (image, {"tile": (64, 64), **jpeg}),
            (small, {"rowsperstrip": 16, "compression": "deflate"}),
        ]
        for one, how in ways:
            tifffile.imwrite(path, one, **how)
            found.append(path.read_bytes())
        return [*found, imagecodecs.png_encode(small), imagecodecs.jpeg8_encode(small)]

    def attempt(self, number: int, data: bytes) -> None:
        ending = ("tif", "tif", "svs", "tif", "png", "jpg")[number]
        path = self._folder / f"slide.{ending}"
        path.write_bytes(data)
        inspect(path)
        with Slide(path) as slide:
            rows, cols = slide.size
            for scale in slide.downsamples[:4]:
                slide.read_scaled(0, 0, (40, 50), scale)
                slide.read_scaled(cols // 2, rows // 2, (30, 30), scale * 1.3)
            slide.thumbnail(max(rows, cols) / 50)


TARGETS: dict[str, type[Target]] = {
    "manifest": ManifestTarget,
    "shard": ShardTarget,
    "csv": CsvTarget,
    "geojson": GeojsonTarget,
    "xml": XmlTarget,
    "checkpoint": CheckpointTarget,
    "records": RecordTarget,
    "slide": SlideTarget,
}
