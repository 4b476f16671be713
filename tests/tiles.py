"""Small tiles, so that small inputs take several."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch_pfc.ops import _tiles


@contextmanager
def tiles_of(elements: int) -> Iterator[None]:
    """Within, a tile's buffers hold at most `elements` elements (one class at least)."""
    before = _tiles.TILE_ELEMENTS
    _tiles.TILE_ELEMENTS = elements
    try:
        yield
    finally:
        _tiles.TILE_ELEMENTS = before
