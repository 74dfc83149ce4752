"""JPEG tiles of a level of a slide, or of a box of it, without decoding."""

from __future__ import annotations

from collections.abc import Callable

from spatialdl.data.jpeg import EncodedImage, JpegStream


class JpegGrid(EncodedImage):
    """The tiles of a level stored as JPEG, for `ShardWriter.add`.

    ::

        grid = slide.jpeg_grid(scale)
        if grid is not None:
            writer.add(grid.box(0, 512, 256, 1024), slide=slide.name, xy=(256, 0))

    Tiles at the right and bottom edge of the level are complete, padded by the scanner.

    Args:
        shape: rows, columns and channels (1 for grey JPEGs, else 3), in pixels of the level.
        chunk: rows and columns of a tile.
        downsample: level-0 pixels per pixel.
        stream: returns the tile at a row and column of the level's grid, or raises SlideError.
        first: row and column of the first tile in the level's grid.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        chunk: tuple[int, int],
        downsample: float,
        stream: Callable[[int, int], JpegStream],
        first: tuple[int, int] = (0, 0),
    ) -> None:
        self.shape = shape
        self.chunk = chunk
        self.downsample = downsample
        self._stream = stream
        self._first = first

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        return -(-self.shape[0] // self.chunk[0]), -(-self.shape[1] // self.chunk[1])

    def encoded(self, row: int, col: int) -> JpegStream:
        """Return a tile by row and column of the grid: a complete JPEG, checked for damage.

        Raises:
            SlideError: the tile is missing or damaged.
            IndexError: the tile is not in the grid.
        """
        rows, cols = self.tiles
        if not (0 <= row < rows and 0 <= col < cols):
            raise IndexError(f"tile at row {row}, column {col} of {rows} x {cols}")
        return self._stream(self._first[0] + row, self._first[1] + col)

    def box(self, row0: int, row1: int, col0: int, col1: int) -> JpegGrid:
        """Return a half-open box that begins at a tile boundary; it may end anywhere.

        Raises:
            ValueError: the box begins within a tile, is empty, or not inside.
        """
        (rows, cols, channels), (high, wide) = self.shape, self.chunk
        if not (0 <= row0 < row1 <= rows and 0 <= col0 < col1 <= cols):
            raise ValueError(
                f"box rows {row0}:{row1}, columns {col0}:{col1} is not inside {rows} x {cols}"
            )
        if row0 % high or col0 % wide:
            raise ValueError(
                f"box begins at row {row0}, column {col0}, within a tile of {high} x {wide}; "
                "align it with the tiles"
            )
        first = self._first[0] + row0 // high, self._first[1] + col0 // wide
        shape = row1 - row0, col1 - col0, channels
        return JpegGrid(shape, self.chunk, self.downsample, self._stream, first)

    def at(self, x: int, y: int, size: tuple[int, int]) -> JpegGrid | None:
        """Return the box with the pixels of `Slide.read_scaled(x, y, size, scale)`.

        Args:
            x: level-0 column of the top-left corner, relative to that of this grid.
            y: level-0 row of the corner.
            size: rows and columns, in pixels of the level.

        Returns:
            None if the box begins between pixels or within a tile, or is not inside.
        """
        row, col = y / self.downsample, x / self.downsample
        inside = 0 <= row <= self.shape[0] - size[0] and 0 <= col <= self.shape[1] - size[1]
        if not inside or row % self.chunk[0] or col % self.chunk[1]:
            return None
        return self.box(int(row), int(row) + size[0], int(col), int(col) + size[1])
