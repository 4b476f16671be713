"""Open-set recognition as it is measured for faces.

A *probe* is a glyph of a test character in a test typeface; the *gallery* has one Noto Sans glyph
per test character, the *hard gallery* also those of all training and validation characters, as
distractors. Only probes whose character is in the gallery are asked. All scores are cosines.

- rank-1: the part of the probes whose best match in the gallery is their own character.
- TAR at FAR f: all probe-gallery pairs are compared; with I impostor pairs (of two characters), the
  threshold is the (floor(f I) + 1)-th largest impostor score and a pair is accepted strictly above
  it, so that at most f I impostors are; TAR is the part of the genuine pairs (of one character)
  accepted. Undefined, "-", where f I < 1.

Next to the network stands the raw-pixel baseline under the same protocol: the correlation of the
two images (cosine after each image's mean is subtracted).
"""

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from .data import Split, rows_of
from .glyphs import Glyphs
from .model import Backbone, embed
from .terminal import Failure

FARS = (1e-3, 1e-4)
CHUNK = 256  # probes scored at a time, to bound the memory of a chunk by the gallery's size


@dataclasses.dataclass(frozen=True)
class Result:
    """One line of the report.

    Attributes:
        typeface: of the probes.
        gallery: "plain" or "hard".
        method: "raw pixels" or "network".
        probes, entries: how many probes were asked, how many glyphs the gallery has.
        impostors: how many pairs of different characters were compared.
        rank1: part of 1.
        tar: for each of `FARS`, part of 1 or None.
    """

    typeface: str
    gallery: str
    method: str
    probes: int
    entries: int
    impostors: int
    rank1: float
    tar: tuple[float | None, ...]


def score(
    probes: Tensor, probe_ids: Tensor, gallery: Tensor, gallery_ids: Tensor, fars: tuple[float, ...] = FARS
) -> tuple[float, tuple[float | None, ...], int]:
    """Rank-1 and TAR at each of `fars`.

    Args:
        probes: unit vectors [P, D].
        probe_ids: [P].
        gallery: unit vectors [G, D].
        gallery_ids: [G].

    Returns:
        rank-1, the TARs, the number of impostor pairs.
    """
    num_impostors = int(len(probe_ids) * len(gallery_ids) - (probe_ids[:, None] == gallery_ids).sum())
    allowed = [int(far * num_impostors) for far in fars]
    keep = max(allowed) + 1
    hits = 0
    genuine = []
    largest = torch.empty(0)  # impostor scores, the `keep` largest so far
    for first in range(0, len(probes), CHUNK):
        scores = probes[first : first + CHUNK] @ gallery.T
        ids = probe_ids[first : first + CHUNK]
        hits += int((gallery_ids[scores.argmax(1)] == ids).sum())
        same = ids[:, None] == gallery_ids
        genuine.append(scores[same])
        scores[same] = -torch.inf
        floor = largest[-1] if len(largest) == keep else -torch.inf
        largest = torch.cat([largest, scores[scores > floor]])
        largest = largest.topk(min(keep, len(largest))).values
    own = torch.cat(genuine)
    tar = tuple(float((own > largest[count]).float().mean()) if 0 < count < len(largest) else None for count in allowed)
    return hits / len(probes), tar, num_impostors


def rank1(probes: Tensor, probe_ids: Tensor, gallery: Tensor, gallery_ids: Tensor) -> float:
    """Part of the probes [P, D] whose best match in the gallery [G, D] has their id."""
    best = (probes @ gallery.T).argmax(1)
    return float((gallery_ids[best] == probe_ids).float().mean())


def pixels(images: NDArray[np.uint8], rows: NDArray[np.int64]) -> Tensor:
    """The raw-pixel vectors [n, 1600] of `images[rows]`: mean subtracted, of unit length."""
    flat = torch.from_numpy(images[rows]).flatten(1).float()
    return F.normalize(flat - flat.mean(1, keepdim=True))


def first_of_each(ids: NDArray[np.int32]) -> NDArray[np.int64]:
    """Positions of the first occurrence of each id [n], by id."""
    return np.unique(ids, return_index=True)[1]


def gallery_rows(glyphs: Glyphs, identities: NDArray[np.int32], design: int) -> NDArray[np.int64]:
    """One row for each of the identities that the gallery typeface has."""
    rows = rows_of(glyphs, identities, [design])
    return rows[first_of_each(glyphs.identity[rows])]


def probe_rows(
    glyphs: Glyphs, identities: NDArray[np.int32], design: int, gallery: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The rows of the identities in a typeface, as far as the gallery rows have them too."""
    rows = rows_of(glyphs, identities, [design])
    return rows[np.isin(glyphs.identity[rows], glyphs.identity[gallery])]


def evaluate(
    backbone: Backbone, glyphs: Glyphs, split: Split, gallery: int, tests: list[int]
) -> tuple[list[Result], NDArray[np.int64], Tensor]:
    """Each test typeface against both galleries by both methods.

    Returns:
        The lines of the report; the rows [G] of the hard gallery, those of the plain one first; their embeddings
        [G, 128].

    Raises:
        Failure: a test typeface shares no test character with the gallery.
    """
    plain = gallery_rows(glyphs, split.test, gallery)
    others = np.concatenate([split.train, split.validate])
    hard = np.concatenate([plain, gallery_rows(glyphs, others, gallery)])
    probes = {design: probe_rows(glyphs, split.test, design, plain) for design in tests}
    for design, rows in probes.items():
        if not len(rows):
            names = glyphs.names
            raise Failure(f"{names[design]!r} and the gallery {names[gallery]!r} share no test character")

    def embeddings(rows: NDArray[np.int64]) -> Tensor:
        return embed(backbone, glyphs.images, rows)

    def centred(rows: NDArray[np.int64]) -> Tensor:
        return pixels(glyphs.images, rows)

    def ids(rows: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(glyphs.identity[rows])

    results = []
    for method, vectors in (("raw pixels", centred), ("network", embeddings)):
        entries = vectors(hard)
        for design, rows in probes.items():
            asked = vectors(rows)
            for name, num in (("plain", len(plain)), ("hard", len(hard))):
                best, tar, impostors = score(asked, ids(rows), entries[:num], ids(hard[:num]))
                results.append(Result(glyphs.names[design], name, method, len(rows), num, impostors, best, tar))
    return results, hard, entries
