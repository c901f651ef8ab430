"""Every source gives rows whose targets are what the loss counts, and says what is wrong with its input."""

import itertools
import json
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxacc import losses
from jaxacc.experiment import sources
from jaxacc.experiment.cli import main
from jaxacc.experiment.config import BatchConfig, Config, DataConfig, TrainConfig, UserError, check
from jaxacc.experiment.config import load as load_config
from jaxacc.experiment.pieces import cut, pack
from jaxacc.experiment.rows import Joined, digest_rows, make_rows
from jaxacc.experiment.shapes import draw_shapes
from jaxacc.experiment.tokens import BEGIN, BOUNDARY, END

CONTEXT = 24
CHATS = [{"prompt": "p" * (n % 7), "response": "abcdefghij"[: 1 + n % 9] + str(n)} for n in range(30)]
TALK = {
    "messages": [
        {"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "u"},
        {"role": "assistant", "content": ""},
    ]
}  # fmt: skip


def jsonl(path, entries):
    path.write_text("\n".join(json.dumps(entry) for entry in entries))
    return str(path)


def texts(path):
    path.write_text("\n\n".join("xyz" * (2 * n) + str(n) for n in range(1, 12)))
    return {"paths": (str(path),), "documents": "paragraph"}


def tokens(path, shape, dtype=np.uint16):
    np.save(path, np.random.default_rng(0).integers(0, 50, shape, dtype))
    return str(path)


def configs(folder):
    """One of every source of tokens."""
    stream = np.random.default_rng(1).integers(0, 50, 400).astype("<u4")
    stream.tofile(folder / "a.bin")
    files = (tokens(folder / "b.npy", 300), tokens(folder / "c.npy", 90))
    return {
        "text": {**texts(folder / "a.txt")},
        "jsonl": {"paths": (jsonl(folder / "a.jsonl", [*CHATS, TALK]),), "context": 80},
        "bin": {"source": "tokens", "paths": (str(folder / "a.bin"),), "token_dtype": "uint32", "vocabulary": 50},
        "files": {"source": "tokens", "paths": files, "vocabulary": 50},
        "rows": {"source": "tokens", "paths": (tokens(folder / "d.npy", (7, 60)),), "vocabulary": 50},
    }


def load(name, folder, **options):
    return sources.load(
        DataConfig(**{"source": name, "context": CONTEXT, "held_out": 0.25, **configs(folder)[name], **options})
    )


def everything(rows):
    return rows.batch(np.arange(len(rows.targets)))


@jax.jit
def counted(batch):
    """The weight of every row by the loss itself."""
    count = lambda labels, segments: losses.causal_lm(jnp.zeros((*labels.shape, 2)), labels, segment_ids=segments).weight
    return jax.vmap(count)(batch["labels"], batch.get("segment_ids", jnp.ones_like(batch["labels"])))


def pieces_of(rows):
    """Tokens and labels of every piece, sorted; asserts that segments count from 1 and padding holds nothing."""
    batch = everything(rows)
    segments = batch.get("segment_ids", (batch["labels"] != -100).astype(int))
    found = []
    for row in range(len(segments)):
        ids = segments[row]
        assert sorted(set(ids[ids > 0])) == list(range(1, ids.max() + 1))
        assert (np.diff(ids[ids > 0]) >= 0).all()
        assert (batch["labels"][row][ids == 0] == -100).all()
        found += [tuple(batch["tokens"][row][ids == number].tolist()) for number in range(1, ids.max() + 1)]
    return sorted(found)


@pytest.mark.parametrize(
    ("name", "packing"),
    [("text", False), ("text", True), ("jsonl", False), ("jsonl", True), ("bin", False), ("files", False), ("rows", False)],
)
def test_targets_are_what_the_loss_counts(tmp_path, name, packing):
    """For every row, and every class; no row weighs nothing; a row depends on nothing but its index."""
    corpus = load(name, tmp_path, packing=packing)
    for rows in (corpus.train, corpus.held_out):
        batch = everything(rows)
        assert rows.targets.dtype == np.int64
        assert (rows.targets > 0).all()
        assert (np.asarray(counted(batch)) == rows.targets).all()
        naive = (batch["labels"] != -100).sum(1)  # a planted mistake: position 0 and first tokens of segments counted
        assert name == "jsonl" or (naive > rows.targets).all()
        assert batch["tokens"].dtype == batch["labels"].dtype == np.int32
        assert ("segment_ids" in batch) == packing
        segments = batch.get("segment_ids", np.ones_like(batch["labels"]))
        real = (batch["labels"][:, 1:] != -100) & (segments[:, 1:] == segments[:, :-1])
        counts = np.bincount(batch["labels"][:, 1:][real], minlength=corpus.vocabulary)
        assert (rows.label_counts() == counts).all()
        assert rows.label_counts().sum() == rows.targets.sum()
        shuffled = np.random.default_rng(0).permutation(len(rows.targets))
        again = rows.batch(shuffled)
        assert all((again[leaf] == batch[leaf][shuffled]).all() for leaf in batch)
        assert not (again["tokens"] == batch["tokens"]).all()
    assert corpus.notes == ()


def test_two_rows_with_two_and_three_segments_have_27_targets():
    """16 tokens each: 14 and 13 targets, not 15 and 15."""
    lengths = np.array([10, 6, 7, 5, 4])
    starts = np.cumsum(lengths) - lengths
    rows = make_rows(np.arange(32), starts, lengths, context=16, vocabulary=32, padding=0, packing=True)
    batch = everything(rows)
    assert sorted(batch["segment_ids"].max(1)) == [2, 3]
    assert int(losses.causal_lm(jnp.zeros((2, 16, 32)), batch["labels"], segment_ids=batch["segment_ids"]).weight) == 27
    assert sorted(rows.targets) == [13, 14]
    assert int(losses.causal_lm(jnp.zeros((2, 16, 32)), batch["labels"]).weight) == 30  # without the ids


def test_the_first_token_of_a_piece_is_no_target_even_if_supervised():
    """Its label stays, as the loss does not count it; the fingerprint sees which pieces share a row."""
    lengths, supervised = np.array([4, 4]), np.array([1, 1, 0, 1, 1, 0, 0, 1], bool)
    rows, apart = (
        make_rows(
            np.arange(8),
            np.array([0, 4]),
            lengths,
            context=context,
            vocabulary=8,
            padding=0,
            packing=True,
            supervised=supervised,
        )
        for context in (8, 7)
    )
    assert rows.targets.tolist() == counted(everything(rows)).tolist() == [3]
    assert apart.targets.tolist() == counted(everything(apart)).tolist() == [2, 1]
    assert rows.label_counts().tolist() == apart.label_counts().tolist() == [0, 1, 0, 1, 0, 0, 0, 1]
    assert (everything(rows)["labels"] != -100).sum() == 5
    assert digest_rows(rows) != digest_rows(apart)


@pytest.mark.parametrize("name", ["text", "jsonl"])
def test_packing_keeps_every_sequence_once(tmp_path, name):
    """The same sequences, labels and number of targets in fewer rows."""
    loose, packed = (load(name, tmp_path, packing=packing) for packing in (False, True))
    for part in ("train", "held_out"):
        one, other = getattr(loose, part), getattr(packed, part)
        assert other.targets.sum() == one.targets.sum()
        assert (other.label_counts() == one.label_counts()).all()
        if name == "text":
            assert pieces_of(other) == pieces_of(one)
        else:
            assert sorted(map(len, pieces_of(other))) == sorted(one.lengths)
    assert len(packed.train.targets) < len(loose.train.targets)
    assert packed.fingerprint != loose.fingerprint
    assert packed.fingerprint == load(name, tmp_path, packing=True).fingerprint


def test_packed_rows_are_full_and_never_too_full():
    """Whole pieces, each once; half of the room at most stays empty in all rows but one."""
    rng = np.random.default_rng(0)
    for context in (2, 10, 100):
        lengths = rng.integers(2, context + 1, 300)
        order, first = pack(lengths, context)
        assert sorted(order) == list(range(300))
        assert (np.diff(first) > 0).all()
        assert first[-1] == 300
        used = np.add.reduceat(lengths[order], first[:-1])
        assert used.max() <= context
        assert (used * 2 <= context).sum() <= 1
        assert all((a == b).all() for a, b in zip(pack(lengths, context), (order, first), strict=True))


def test_cuts_overlap_by_one():
    """Against a loop."""
    for context, lengths in itertools.product((2, 3, 7), ([2], [9, 2, 3], [7, 8, 13, 6])):
        expected, begin = [], 0
        for length in lengths:
            expected += [(begin + at, min(length - at, context)) for at in range(0, length - 1, context - 1)]
            begin += length
        assert list(zip(*(part.tolist() for part in cut(np.array(lengths), context)), strict=True)) == expected


def test_text_rows_are_those_of_the_first_release(tmp_path):
    """The fingerprint of before there were other sources, of a text that does not change with Python."""
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join("ab" * (3 * n) + "." for n in range(1, 9)))
    corpus = sources.load(DataConfig(paths=(str(path),), documents="paragraph", context=9, held_out=0.3))
    assert corpus.fingerprint == "b143cf9ebaa1460b91b08350133542184325689ea803e689ae09f05a29c4af3f"
    assert corpus.vocabulary == 257
    assert sources.load(DataConfig()).notes == ()


def test_chats_have_one_template(tmp_path):
    """BEGIN role newline content END; what the assistant says and its END are targets, nothing else."""
    path = jsonl(tmp_path / "a.jsonl", [TALK, {"prompt": "hi", "response": "yo"}, *CHATS])
    corpus = sources.load(DataConfig(source="jsonl", paths=(path,), context=64))
    batches = [everything(rows) for rows in (corpus.train, corpus.held_out)]
    rows = {bytes(t[t < 256].tolist()): (t, y) for b in batches for t, y in zip(b["tokens"], b["labels"], strict=True)}
    expected = [BEGIN, *b"user\nhi", END, BEGIN, *b"assistant\n", *b"yo", END]
    tokens, labels = rows[b"user\nhiassistant\nyo"]
    assert tokens[: len(expected)].tolist() == expected
    assert labels[labels != -100].tolist() == [*b"yo", END]
    tokens, labels = rows[b"system\nsassistant\nauser\nuassistant\n"]
    assert labels[labels != -100].tolist() == [ord("a"), END, END]
    assert corpus.vocabulary == 259


def test_long_chats_are_cut_counted_and_never_empty(tmp_path):
    """A response is cut at the context; an example without a target is left out; both are said."""
    long, hopeless = {"prompt": "", "response": "z" * 100}, {"prompt": "p" * 100, "response": "r"}
    silent = {"messages": [{"role": "user", "content": "u"}]}
    whole = {"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "u" * 99}]}
    corpus = sources.load(
        DataConfig(source="jsonl", paths=(jsonl(tmp_path / "a", [*CHATS, long, hopeless, silent, whole]),), context=48)
    )
    parts = (corpus.train, corpus.held_out)
    assert sum(len(rows.targets) for rows in parts) == 32
    assert all((rows.targets > 0).all() for rows in parts)
    tokens = np.concatenate([everything(rows)["tokens"] for rows in parts])
    assert (tokens == ord("z")).sum(1).max() == 48 - len("<user\n><assistant\n")
    assert corpus.notes == (
        "1 of 34 examples were longer than the context of 48 tokens: responses were cut.",
        "2 of 34 examples have no response within the context of 48 tokens and were left out.",
    )
    with pytest.raises(UserError, match="none of 1 examples has a response"):
        sources.load(DataConfig(source="jsonl", paths=(jsonl(tmp_path / "b", [hopeless]),), context=48))


def test_repeated_examples_are_said_and_stay_on_one_side(tmp_path):
    """Nothing that is held out is trained on, whatever the order."""
    entries = [chat for chat in CHATS for _ in range(3)]
    forward, backward = (
        sources.load(DataConfig(source="jsonl", paths=(jsonl(tmp_path / name, part),), context=48, held_out=0.4))
        for name, part in (("a", entries), ("b", entries[::-1]))
    )
    assert forward.notes == ("60 of 90 examples repeat an earlier one; they are kept, on the same side of the split.",)
    train, held_out = ({bytes(row) for row in everything(rows)["tokens"].astype(np.uint16)} for rows in forward[:2])
    assert len(train) + len(held_out) == 30
    assert not train & held_out
    assert held_out == {bytes(row) for row in everything(backward.held_out)["tokens"].astype(np.uint16)}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", r"a.jsonl, line 3 is not JSON"),
        (b"\xff", r"line 3 is not UTF-8"),
        (b"[1]", r"line 3 holds a list. It must hold either"),
        (b"{}", r"line 3 holds the keys of nothing"),
        (b'{"prompt": "p"}', r"line 3 holds the keys prompt"),
        (b'{"prompt": "p", "response": 3}', r"line 3: response is a int. It must be a string"),
        (b'{"prompt": null, "response": "r"}', r"line 3: prompt is missing"),
        (b'{"prompt": "p", "response": "\\ud800"}', r"line 3: response holds half of a surrogate"),
        (b'{"prompt": "p", "response": "r", "messages": []}', r"line 3 holds the keys messages, prompt, response"),
        (b'{"messages": []}', r"line 3: messages must be a list"),
        (b'{"messages": [{"role": "user"}]}', r"line 3: content of message 0 is missing"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    """By file and number, counting blank lines; a byte order mark and Windows line ends are none of them."""
    path = tmp_path / "a.jsonl"
    good = b"\xef\xbb\xbf" + json.dumps(CHATS[0]).encode() + b"\r\n\n"
    config = DataConfig(source="jsonl", paths=(str(path),))
    path.write_bytes(good + line)
    with pytest.raises(UserError, match=message):
        sources.load(config)
    path.write_bytes(good + json.dumps(CHATS[1]).encode())
    sources.load(config)


def test_token_files_are_cut_in_place(tmp_path):
    """Every token but the first is a target once; rows of a file stay whole; the last are held out."""
    for name, units in (("bin", 400), ("rows", 60)):
        corpus = load(name, tmp_path)
        targets = [rows.label_counts().sum() for rows in (corpus.train, corpus.held_out)]
        assert sum(targets) == {"bin": 399, "rows": 7 * 59}[name]
        assert isinstance(corpus.train.stream, np.memmap) or isinstance(corpus.train.stream.base, np.memmap)
        assert (corpus.train.starts.max() + corpus.train.lengths[-1] - 1) <= corpus.held_out.starts.min()
        assert name != "rows" or corpus.held_out.starts.min() % units == 0
    joined = load("files", tmp_path).train
    assert isinstance(joined, Joined)
    wanted = np.array([len(joined.targets) - 1, 0, len(joined.parts[0].targets)])
    whole = [everything(part)["tokens"] for part in joined.parts]
    assert (joined.batch(wanted)["tokens"] == np.concatenate(whole)[wanted]).all()


def test_ids_are_checked_in_chunks(tmp_path, monkeypatch):
    """The position is that in the file."""
    monkeypatch.setattr(sources, "CHUNK", 16)
    np.save(tmp_path / "a.npy", np.arange(60))
    with pytest.raises(UserError, match="token id 50 at position 50"):
        sources.load(DataConfig(source="tokens", paths=(str(tmp_path / "a.npy"),), vocabulary=50, context=8))


def test_a_large_token_file_is_not_read(tmp_path):
    """What is read is what is asked for; the fingerprint sees size and blocks; a wrong id is named when it is met."""
    path, size = tmp_path / "large.bin", 2**29
    with path.open("wb") as file:
        file.truncate(size)
    config = DataConfig(source="tokens", paths=(str(path),), token_dtype="uint16", vocabulary=100, context=1025)
    tracemalloc.start()
    corpus = sources.load(config)
    corpus.train.batch([0, 70_000])
    assert tracemalloc.get_traced_memory()[1] < size / 8
    tracemalloc.stop()
    with path.open("r+b") as file:
        file.seek(size - 2)
        file.write(b"\x64\x00")
    changed = sources.load(config)
    assert changed.fingerprint != corpus.fingerprint
    with pytest.raises(UserError, match=f"large.bin: token id 100 at position {size // 2 - 1} is not in the vocabulary of 100"):
        changed.held_out.batch([len(changed.held_out.targets) - 1])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.arange(60), "token id 50 at position 50 is not in the vocabulary of 50"),
        (np.array([3] * 40 + [-1]), "token id -1 at position 40"),
        (np.zeros((2, 2, 2), int), r"holds int64 \(2, 2, 2\)"),
        (np.zeros(60), "holds float64"),
        (np.zeros((60, 2), int).T, "in C order"),
        (np.zeros(0, int), "is empty"),
        (np.zeros((30, 1), int), "rows of 1 token"),
        (np.zeros(5, int), "one row cannot be split"),
        (np.array([None]), "is not an .npy file"),
    ],
)
def test_bad_token_files(tmp_path, array, message):
    """Each says what the file holds and what it should."""
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(UserError, match=message):
        sources.load(DataConfig(source="tokens", paths=(str(tmp_path / "a.npy"),), vocabulary=50, context=8))


def test_bad_bins(tmp_path):
    """Half a token, nothing, another ending, none."""
    (tmp_path / "odd.bin").write_bytes(b"123")
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "a.txt").write_text("text")
    for name, message in [("odd.bin", "no multiple of 2"), ("empty.bin", "is empty"), ("a.txt", "neither"), ("no.bin", "read")]:
        with pytest.raises(UserError, match=message):
            sources.load(
                DataConfig(source="tokens", paths=(str(tmp_path / name),), vocabulary=50, token_dtype="uint16", context=8)
            )


def pictures(n=6, size=(4, 5), classes=3, seed=0):
    rng = np.random.default_rng(seed)
    masks = rng.integers(0, classes, (n, *size)).astype(np.uint8)
    masks[rng.random(masks.shape) < 0.3] = 255
    return rng.integers(0, 256, (n, *size, 3), np.uint8), masks


def test_images_of_arrays_and_folders_are_the_same(tmp_path):
    """8 bits become [0, 1]; targets are what the loss counts."""
    image = pytest.importorskip("PIL.Image")
    images, masks = pictures()
    np.savez(tmp_path / "a.npz", images=images[:3], masks=masks[:3])
    np.savez(tmp_path / "b.npz", images=images[3:], masks=masks[3:].astype(np.int64))
    for folder, arrays in (("images", images), ("masks", masks)):
        (tmp_path / "set" / folder).mkdir(parents=True)
        for index, array in enumerate(arrays):
            image.fromarray(array).save(tmp_path / "set" / folder / f"{index}.png")
    found = []
    for paths in (("a.npz", "b.npz"), ("set",)):
        config = DataConfig(source="images", paths=tuple(str(tmp_path / p) for p in paths), vocabulary=3, held_out=0.4)
        corpus = sources.load(config)
        assert (len(corpus.train.targets), len(corpus.held_out.targets)) == (4, 2)
        assert corpus.train.fill == {"labels": 255}
        for rows in (corpus.train, corpus.held_out):
            batch = everything(rows)
            assert (batch["images"].dtype, batch["labels"].dtype) == (np.float32, np.uint8)
            weight = jax.vmap(lambda labels: losses.segmentation(jnp.zeros((*labels.shape, 3)), labels).weight)(batch["labels"])
            assert (rows.targets == np.asarray(weight)).all()
            assert (rows.label_counts() == np.bincount(batch["labels"].ravel(), minlength=256)[:3]).all()
            found += zip((batch["images"] * 255).round().astype(np.uint8), batch["labels"], strict=True)
    pairs = lambda images, masks: sorted(image.tobytes() + mask.tobytes() for image, mask in zip(images, masks, strict=True))
    assert pairs(*zip(*found, strict=True)) == sorted(2 * pairs(images, masks))


def _images(**change):
    images, masks = pictures()
    return {"images": images, "masks": masks, **change}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": np.zeros((2, 3, 3))}, "has no array masks"),
        (_images(images=np.where(np.arange(120) == 30, np.nan, 0).reshape(6, 4, 5)), "a.npz, image 1 has NaN or infinity"),
        (_images(images=np.zeros((6, 4, 4))), "must be"),
        (_images(images=np.zeros((6, 4, 5), int)), "images are int64"),
        (_images(masks=np.zeros((6, 4, 5))), "masks are float64"),
        (_images(masks=np.full((6, 4, 5), 3)), "image 0: the mask is 3 at row 0, column 0, and data.vocabulary is 3 classes"),
        (_images(masks=np.full((6, 4, 5), -1)), "the mask is -1"),
        (_images(masks=np.full((6, 4, 5), 255)), "none of 6 images has a labelled pixel"),
        ({"images": np.zeros((0, 3, 3)), "masks": np.zeros((0, 3, 3), int)}, "is empty"),
        ({"images": np.zeros((2, 3, 3)), "masks": np.zeros((2, 3, 3), int)}, "one image cannot be split"),
    ],
)
def test_bad_image_files(tmp_path, arrays, message):
    """Each names the file, and the image where it is one."""
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UserError, match=message):
        sources.load(DataConfig(source="images", paths=(str(tmp_path / "a.npz"),), vocabulary=3))


def test_images_without_labels_are_left_out(tmp_path):
    """Equal ones stay together, whatever their masks; two sizes are an error that names both."""
    images, masks = pictures()
    masks[2] = 255
    np.savez(tmp_path / "a.npz", images=images, masks=masks)
    corpus = sources.load(DataConfig(source="images", paths=(str(tmp_path / "a.npz"),), vocabulary=3))
    assert len(corpus.train.targets) + len(corpus.held_out.targets) == 5
    assert corpus.notes == ("1 of 6 images have no labelled pixel and were left out.",)
    images[:3], masks[2] = images[0], 0
    np.savez(tmp_path / "c.npz", images=images, masks=masks)
    corpus = sources.load(DataConfig(source="images", paths=(str(tmp_path / "c.npz"),), vocabulary=3, held_out=0.4))
    assert corpus.notes == ("2 of 6 images repeat an earlier one; they are kept, on the same side of the split.",)
    pixels = [{image.tobytes() for image in everything(rows)["images"]} for rows in (corpus.train, corpus.held_out)]
    assert not pixels[0] & pixels[1]
    other, their = pictures(size=(4, 4))
    np.savez(tmp_path / "b.npz", images=other, masks=their)
    paths = tuple(str(tmp_path / name) for name in ("a.npz", "b.npz"))
    with pytest.raises(UserError, match=r"b.npz, image 0 is \(4, 4, 3\) .*a.npz, image 0 is \(4, 5, 3\)"):
        sources.load(DataConfig(source="images", paths=paths, vocabulary=3))


def test_bad_folders(tmp_path, monkeypatch):
    """A mask without its image, a picture that is none, a mask of colours, no Pillow."""
    image = pytest.importorskip("PIL.Image")
    config = DataConfig(source="images", paths=(str(tmp_path),), vocabulary=3)
    for folder, message in (("images", "has no folder images"), ("masks", "has no folder masks")):
        with pytest.raises(UserError, match=message):
            sources.load(config)
        (tmp_path / folder).mkdir()
    image.new("RGB", (4, 4)).save(tmp_path / "images" / "a.png")
    with pytest.raises(UserError, match=r"a\.png has no partner"):
        sources.load(config)
    for mask, message in ((image.new("RGB", (4, 4)), "mode RGB"), (image.new("L", (4, 3)), r"its mask is \(3, 4\)")):
        mask.save(tmp_path / "masks" / "a.png")
        with pytest.raises(UserError, match=message):
            sources.load(config)
    (tmp_path / "masks" / "a.png").write_text("text")
    with pytest.raises(UserError, match="is not a picture"):
        sources.load(config)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match="pip install pillow"):
        sources.load(config)


def test_shapes_are_drawn_from_their_number():
    """Targets are known before anything is drawn; row r does not depend on how many there are."""
    config = DataConfig(source="shapes", examples=40, size=32)
    corpus, larger = sources.load(config), sources.load(DataConfig(source="shapes", examples=80, size=32))
    assert (len(corpus.train.targets), len(corpus.held_out.targets)) == (36, 4)
    assert corpus.fingerprint == sources.load(config).fingerprint != larger.fingerprint
    batch, rows = corpus.train.batch([5, 3]), larger.train.batch([3, 5])
    assert all((batch[leaf] == rows[leaf][::-1]).all() for leaf in batch)
    assert not (batch["images"][0] == batch["images"][1]).all()
    batch = everything(corpus.train)
    assert batch["images"].shape == (36, 32, 32, 3)
    assert 0 <= batch["images"].min() < batch["images"].max() <= 1
    assert (corpus.train.targets == (batch["labels"] != 255).sum((1, 2))).all()
    assert corpus.train.targets.min() < 0.8 * corpus.train.targets.max()
    assert (corpus.train.label_counts() == np.bincount(batch["labels"].ravel(), minlength=256)[:4]).all()


def test_shapes_are_not_a_matter_of_colour():
    """A table of the frequencies of classes by colour, from 150 images, does not beat the frequencies on others."""
    draw = lambda begin, end: map(np.stack, zip(*(draw_shapes(48, row) for row in range(begin, end)), strict=True))
    code = lambda images: np.minimum(images * 6, 5).astype(int) @ [36, 6, 1]
    images, labels = draw(0, 150)
    real = labels != 255
    table = np.ones((216, 4))
    np.add.at(table, (code(images)[real], labels[real]), 1)
    images, labels = draw(150, 200)
    real = labels != 255
    by_colour = -np.log(table / table.sum(1, keepdims=True))[code(images)[real], labels[real]].mean()
    by_frequency = -np.log(table.sum(0) / table.sum())[labels[real]].mean()
    assert by_colour > 0.95 * by_frequency
    assert by_frequency > 0.6
    inside = real & (labels > 0)
    assert inside.sum() / real.sum() > 0.15


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "images", "tokenizer": "t.json", "packing": True}, "data.packing=True does not belong"),
        ({"source": "shapes", "paths": ("a",)}, r"data.paths=\('a',\) does not belong to data.source=\"shapes\""),
        ({"source": "text", "split": "test"}, 'but to "hf"'),
        ({"source": "text", "vocabulary": 9}, 'but to "tokens" and "images"'),
        ({"source": "jsonl"}, "needs data.paths"),
        ({"source": "tokens", "paths": ("a.bin",)}, r"data.vocabulary(.|\n)*data.token_dtype is needed"),
        ({"source": "images", "paths": ("a",), "vocabulary": 256}, "at most 255"),
        ({"source": "hf", "paths": ("a", "b")}, "names 2 datasets"),
        ({"source": "jsonl", "paths": ("a",), "begin_token": "<s>"}, "which is not stated"),
        ({"source": "shapes", "examples": 1}, "data.examples=1 must be at least 2"),
    ],
)
def test_options_belong_to_their_source(options, message):
    """Before anything is read, by the check of the whole config and by load alone."""
    config = DataConfig(**options)
    with pytest.raises(UserError, match=message):
        sources.load(config)
    with pytest.raises(UserError, match=message):
        check(Config(batch=BatchConfig(8, 4), train=TrainConfig(updates=1), data=config))


def test_options_are_read_from_toml_and_the_command_line(tmp_path, capsys):
    """Optional numbers and choices included; another choice is an error that names the known ones."""
    data = {"source": '"tokens"', "paths": '["a.bin"]', "vocabulary": 50257, "token_dtype": '"uint16"', "packing": "true"}
    (tmp_path / "a.toml").write_text("[data]\n" + "\n".join(f"{key} = {value}" for key, value in data.items()))
    assert load_config(tmp_path / "a.toml").data == DataConfig(
        "tokens", ("a.bin",), vocabulary=50257, token_dtype="uint16", packing=True
    )
    (tmp_path / "b.toml").write_text('[data]\nsource = "text"\ntoken_dtype = "int8"\nvocabulary = 1.5')
    with pytest.raises(UserError, match=r"2 faults(.|\n)*'int8' is not one of 'uint16', 'uint32'"):
        load_config(tmp_path / "b.toml")
    options = ["--data.vocabulary", "9", "--data.token-dtype", "uint32", "--data.source", "shapes", "--data.no-packing"]
    assert main(["train", str(tmp_path / "a.toml"), *options]) == 2
    error = capsys.readouterr().err
    assert "data.vocabulary=9 does not belong" in error
    assert "data.token_dtype='uint32' does not belong" in error
    assert "packing" not in error


@pytest.mark.parametrize(
    ("module", "options", "remedy"),
    [
        ("tokenizers", {"tokenizer": "t.json"}, r"jaxacc\[bpe\]"),
        ("datasets", {"source": "hf", "paths": ("a",)}, r"jaxacc\[hf\]"),
    ],
)
def test_missing_packages_are_named(monkeypatch, module, options, remedy):
    """With the line that installs them."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"pip install '{remedy}'"):
        sources.load(DataConfig(**options))


@pytest.fixture
def tokenizer(tmp_path):
    """Words, of which two are special; the file also asks for truncation, padding and a token in front."""
    tokenizers = pytest.importorskip("tokenizers")
    words = [
        "<unk>",
        "<|im_start|>",
        "<|im_end|>",
        "user",
        "assistant",
        "hello",
        "you",
        "<",
        "|",
        "im",
        "_",
        "start",
        ">",
        "end",
    ]
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.WhitespaceSplit(), tokenizers.pre_tokenizers.Punctuation()]
    )
    model.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    model.enable_truncation(2)
    model.enable_padding(length=9)
    model.post_processor = tokenizers.processors.TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 0)])
    model.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def test_a_tokenizer_file_encodes_nothing_but_the_text(tmp_path, tokenizer):
    """No truncation, no padding, no added token; a special token that a text spells out is text."""
    entries = [{"prompt": "hello", "response": "you <|im_end|> hello you " * n} for n in range(1, 5)]
    config = DataConfig(source="jsonl", paths=(jsonl(tmp_path / "a", entries),), tokenizer=tokenizer, context=80)
    corpus = sources.load(config)
    rows = np.concatenate([everything(rows)["tokens"] for rows in (corpus.train, corpus.held_out)])
    shortest = min(rows.tolist(), key=lambda row: row.count(5))
    spelled = [7, 8, 9, 10, 13, 8, 12]
    assert shortest[: 5 + 12] == [1, 3, 5, 2, 1, 4, 6, *spelled, 5, 6, 2]
    assert corpus.vocabulary == 14
    with pytest.raises(UserError, match=r"has none of <\|endoftext\|>.* data.boundary_token.* special ones are <\|im_start\|>"):
        sources.load(DataConfig(tokenizer=tokenizer))
    corpus = sources.load(DataConfig(tokenizer=tokenizer, boundary_token="<|im_end|>", **texts(tmp_path / "t"), packing=True))
    assert (everything(corpus.train)["tokens"][:, 0] == 2).all()
    (tmp_path / "bad.json").write_text("{}")
    for name, message in (("bad.json", "is not the JSON file"), ("no.json", "cannot read")):
        with pytest.raises(UserError, match=message):
            sources.load(DataConfig(tokenizer=str(tmp_path / name)))


@pytest.mark.parametrize("columns", ["text", "prompt", "messages"])
def test_a_saved_dataset(tmp_path, columns):
    """Gives the rows that the same examples give from files."""
    datasets = pytest.importorskip("datasets")
    entries = {
        "text": {"text": [f"text {n}" * n for n in range(12)], "label": [0] * 12},
        "prompt": {key: [chat[key] for chat in CHATS] for key in ("prompt", "response")},
        "messages": {"messages": [[{"role": "assistant", "content": str(n) * n}] for n in range(12)]},
    }[columns]
    datasets.DatasetDict(test=datasets.Dataset.from_dict(entries)).save_to_disk(str(tmp_path / "set"))
    corpus = sources.load(DataConfig(source="hf", paths=(str(tmp_path / "set"),), split="test", context=CONTEXT))
    if columns == "text":
        (tmp_path / "a").write_text("\n\n".join(entries["text"]))
        same = DataConfig(paths=(str(tmp_path / "a"),), documents="paragraph", context=CONTEXT)
    else:
        lines = [dict(zip(entries, values, strict=True)) for values in zip(*entries.values(), strict=True)]
        same = DataConfig(source="jsonl", paths=(jsonl(tmp_path / "a", lines),), context=CONTEXT)
    assert corpus.fingerprint == sources.load(same).fingerprint
    assert corpus.vocabulary == {"text": 257}.get(columns, 259)


def test_bad_datasets(tmp_path):
    """Other columns are listed, a split that is none too, a text that is none is named by its row."""
    datasets = pytest.importorskip("datasets")
    for table, message in [
        ({"content": ["a", "b"], "id": [1, 2]}, "has the columns content, id"),
        ({"text": ["a", None]}, "row 1: text is missing"),
        ({"text": ["", " "]}, "is empty"),
    ]:
        datasets.Dataset.from_dict(table).save_to_disk(str(tmp_path / message[:9]))
        with pytest.raises(UserError, match=message):
            sources.load(DataConfig(source="hf", paths=(str(tmp_path / message[:9]),)))
    datasets.DatasetDict(test=datasets.Dataset.from_dict({"text": ["a"]})).save_to_disk(str(tmp_path / "dict"))
    with pytest.raises(UserError, match="has no split 'train'; it has test"):
        sources.load(DataConfig(source="hf", paths=(str(tmp_path / "dict"),)))
    with pytest.raises(UserError, match="cannot load the dataset"):
        sources.load(DataConfig(source="hf", paths=(str(tmp_path / "nothing"),)))


def test_padding_is_a_token(tmp_path):
    """Of the vocabulary, and not a label."""
    batch = everything(load("text", tmp_path).train)
    assert set(batch["tokens"][batch["labels"] == -100]) == {BOUNDARY}
