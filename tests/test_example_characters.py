"""examples/characters, the parts that need neither fonts nor network: split, merging, measures, flags."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("fontTools", reason="the example's own packages are not installed")

from examples.characters import data, evaluate, fonts, glyphs, options, report, terminal, train
from examples.characters.model import Backbone, embed


def glyph_set(codepoint, design, identity, names):
    random = np.random.default_rng(0)
    images = random.integers(0, 255, (len(codepoint), glyphs.SIDE, glyphs.SIDE), dtype=np.uint8)
    return glyphs.Glyphs(
        images,
        np.array(codepoint, dtype=np.int32),
        np.array(design, dtype=np.int16),
        np.array(identity, dtype=np.int32),
        names,
    )


def test_split_is_disjoint_whole_and_fixed():
    first, second = data.split(30_000), data.split(30_000)
    assert (len(first.test), len(first.validate), len(first.train)) == (2000, 1000, 27_000)
    assert np.array_equal(np.sort(np.concatenate([first.test, first.validate, first.train])), np.arange(30_000))
    assert np.array_equal(first.test, second.test)


def test_batches_hold_only_their_identities_and_designs_and_differ_by_rank():
    known = glyph_set(range(60), [0, 1, 2] * 20, np.repeat(np.arange(20), 3), ["a", "b", "c"])
    mine = np.array([3, 5, 8], dtype=np.int32)
    by_image = {image.tobytes(): row for row, image in enumerate(known.images)}
    drawn = []
    for rank in range(2):
        source = data.batches(known, mine, [0, 2], 6, (0, rank))
        images, labels = next(source)
        assert images.shape == (6, 1, glyphs.SIDE, glyphs.SIDE)
        rows = [by_image[image.numpy().tobytes()] for image in images]
        assert sorted(rows) == [9, 11, 15, 17, 24, 26]  # one pass is each glyph once
        assert known.identity[rows].tolist() == mine[labels.numpy()].tolist()
        drawn.append(rows)
    assert drawn[0] != drawn[1]


def test_augment_keeps_shape_and_range_and_moves_the_glyph():
    torch.manual_seed(0)
    images = torch.zeros(4, 1, 40, 40)
    images[:, :, 10:30, 18:22] = 1
    changed = data.augment(images)
    assert changed.shape == images.shape
    assert changed.min() >= 0
    assert changed.max() <= 1 + 1e-6
    assert not torch.equal(changed[0], changed[1])


def test_identities_merge_what_two_designs_draw_alike():
    one, other, third, blank = (np.full((glyphs.SIDE, glyphs.SIDE), value, dtype=np.uint8) for value in (1, 2, 3, 0))
    # Character 10 and 11 are alike in designs 0 and 1; 11 and 12 in design 2 alone; 13 is blank in design 2.
    images = np.stack([one, one, other, third, one, one, other, third, one, other, other, blank])
    codepoint = np.array([10, 11, 12, 13] * 3, dtype=np.int32)
    design = np.repeat(np.arange(3), 4).astype(np.int16)
    assert glyphs.identities(images, codepoint, design).tolist() == [0, 0, 1, 2, 0, 0, 1, 2, 0, 0, 1, -1]


def test_identities_drop_the_box_for_missing_glyphs():
    num = glyphs.MAX_ALIKE + 1
    images = np.full((num + 1, glyphs.SIDE, glyphs.SIDE), 7, dtype=np.uint8)
    images[-1] = 9
    result = glyphs.identities(images, np.arange(num + 1, dtype=np.int32), np.zeros(num + 1, dtype=np.int16))
    assert result.tolist() == [-1] * num + [0]


def test_rank1_and_tar_by_hand():
    # Three probes, three entries, so six impostor pairs; at FAR 1/3 two impostors may pass.
    scores = torch.tensor([[0.9, 0.8, 0.1], [0.7, 0.6, 0.2], [0.3, 0.0, 0.65]])
    ids = torch.arange(3)
    rank1, tar, impostors = evaluate.score(scores, ids, torch.eye(3), ids, fars=(1 / 3, 0.1))
    assert rank1 == pytest.approx(2 / 3)
    assert impostors == 6
    # Impostors from the top: .8 .7 .3; so the threshold is .3 and all of .9 .6 .65 pass. A tenth of six is none.
    assert tar == (1.0, None)
    assert evaluate.score(scores, ids, torch.eye(3), ids, fars=(1 / 6,))[1] == (pytest.approx(1 / 3),)


def test_score_in_chunks_equals_score_at_once(monkeypatch):
    random = torch.Generator().manual_seed(0)
    probes = F.normalize(torch.randn(40, 8, generator=random))
    gallery = F.normalize(probes + 0.5 * torch.randn(40, 8, generator=random))
    ids = torch.arange(40)
    whole = evaluate.score(probes, ids, gallery, ids, fars=(0.1, 0.01))
    monkeypatch.setattr(evaluate, "CHUNK", 7)
    assert evaluate.score(probes, ids, gallery, ids, fars=(0.1, 0.01)) == whole
    every = probes @ gallery.T
    impostors = every[~torch.eye(40, dtype=torch.bool)].sort(descending=True).values
    assert whole[1][0] == pytest.approx(float((every.diag() > impostors[156]).float().mean()))


def test_evaluation_asks_only_for_characters_the_gallery_has():
    # Identity 1 is not in the gallery design 0; identity 2 is a training character and serves as a distractor.
    known = glyph_set([5, 5, 6, 7, 8, 8], [0, 1, 1, 0, 0, 1], [0, 0, 1, 2, 3, 3], ["gallery", "test"])
    parts = data.Split(
        train=np.array([2], dtype=np.int32),
        validate=np.array([], dtype=np.int32),
        test=np.array([0, 1, 3], dtype=np.int32),
    )
    results, entries, vectors = evaluate.evaluate(Backbone(), known, parts, 0, [1])
    sizes = {(r.gallery, r.method): (r.probes, r.entries, r.impostors) for r in results}
    assert sizes["plain", "network"] == sizes["plain", "raw pixels"] == (2, 2, 2)
    assert sizes["hard", "network"] == (2, 3, 4)
    assert entries.tolist() == [0, 4, 3]
    assert vectors.shape == (3, 128)
    header, lines = report.table(results)
    assert all(len(line) == len(header) for line in lines)
    assert "–" in report.terminal(header, lines)


def test_embed_gives_unit_vectors_and_leaves_training_mode():
    known = glyph_set([1, 2, 3], [0, 0, 0], [0, 1, 2], ["a"])
    backbone = Backbone().train()
    vectors = embed(backbone, known.images, np.array([2, 0]))
    assert vectors.shape == (2, 128)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(2))
    assert backbone.training


def test_roles_hold_out_every_weight_of_a_test_typeface():
    names = ["Kai", "Kai Bold", "Sans CJK", "Sans CJK Bold", "Ming"]
    asked = options.Options(test_typefaces="kai", gallery="Sans")
    assert fonts.roles(names, asked) == (2, [0], [2, 3, 4])


@pytest.mark.parametrize(
    "tests, gallery, message",
    [
        ("Fraktur", "Sans", "no typeface called 'Fraktur' here.*Kai, Sans, Ming"),
        ("Sans", "Sans", "the gallery 'Sans' is also a test typeface"),
        ("Kai,Ming", "Sans", r"at least 2 typefaces, got \['Sans'\]"),
        (",", "Sans", "at least one typeface"),
    ],
)
def test_roles_say_what_is_wrong(tests, gallery, message):
    with pytest.raises(terminal.Failure, match=message):
        fonts.roles(["Kai", "Sans", "Ming"], options.Options(test_typefaces=tests, gallery=gallery))


def test_flags_survive_the_way_to_the_ranks(tmp_path):
    asked = options.parse(["--smoke", "--fonts", str(tmp_path), "--seconds", "3", "--no-compile"])
    assert asked.test_typefaces == options.SMOKE_DEFAULTS["test_typefaces"]
    assert options.parse(asked.to_argv()) == asked


def test_rate_rises_then_falls_to_nothing():
    assert train.rate(0.0) == 0
    assert train.rate(train.WARM_UP) == pytest.approx(1 - train.WARM_UP)
    assert train.rate(1.0) == 0


def test_missing_compiler_is_said_with_the_way_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(terminal.Failure, match=r"no-such-compiler.*--no-compile"):
        train.check_compiler(options.Options())
    train.check_compiler(options.Options(compile=False))


def test_without_apt_the_message_names_the_flag(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(terminal.Failure, match=r"apt-get is not on this machine.*--fonts DIR"):
        fonts.folder(options.Options(cache=tmp_path))
