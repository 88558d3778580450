"""Few unlabelled images on ImageNet networks: the rows, the images, rounding, and the table."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import few_images
import numpy as np
import pytest
import torch
from cases import numbers
from PIL import Image
from torch import nn

from pwfn import Config
from pwfn.zoo.models import DataConfig


def _jpeg(pixels: Any) -> bytes:
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "JPEG")
    return data.getvalue()


def test_packs_and_folders_give_the_same_images(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    blobs = [_jpeg(draw.integers(0, 256, (224, 224, 3), dtype=np.uint8)) for _ in range(4)]
    packs, folders = tmp_path / "packs", tmp_path / "folders"
    packs.mkdir()
    for part in (0, 1):  # an archive for each two images, a folder for each class
        own = blobs[2 * part : 2 * part + 2]
        data, ends = np.frombuffer(b"".join(own), np.uint8), np.cumsum([len(blob) for blob in own])
        np.savez(packs / f"val{part}.npz", data=data, ends=ends, labels=np.array([part, part]))
        (folders / "val" / f"{part:04d}").mkdir(parents=True)
        for number, blob in enumerate(own):
            (folders / "val" / f"{part:04d}" / f"{number}.JPEG").write_bytes(blob)
    images, labels = few_images.read(packs, "val", None)
    assert (images.shape, images.dtype, labels.tolist()) == ((4, 3, 224, 224), torch.uint8, [0, 0, 1, 1])
    for found, wanted in zip(few_images.read(folders, "val", None), (images, labels), strict=True):
        assert torch.equal(found, wanted)
    assert len(few_images.read(packs, "val", 3)[0]) == 3
    with pytest.raises(SystemExit, match="unlabelled"):
        few_images.read(packs, "unlabelled", None)


def test_the_centre_of_a_large_image_is_cropped(tmp_path: Path) -> None:
    """512 × 1024 becomes 256 × 512, of which 16 and 144 pixels are cut at each side."""
    pixels = np.zeros((512, 1024, 3), np.uint8)
    pixels[40:472, 296:728] = 255  # 4 to 220 of the crop
    (tmp_path / "unlabelled").mkdir()
    Image.fromarray(pixels).save(tmp_path / "unlabelled" / "a.png")
    images, labels = few_images.read(tmp_path, "unlabelled", None)
    assert labels.tolist() == [-1]
    assert bool((images[..., 6:-6, 6:-6] == 255).all())
    assert bool((images[..., 0, :] == 0).all() and (images[..., 0] == 0).all())


@pytest.mark.parametrize("train", [False, True])
def test_batches_are_normalised_and_an_epoch_has_every_image_once(train: bool) -> None:
    images = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1).expand(10, 3, 2, 2) * 25
    config = DataConfig((0.5, 0.4, 0.3), (0.1, 0.2, 0.3), 2)
    loader = few_images.Loader(images, torch.arange(10), config, 4, train)
    batches = list(loader)
    assert len(batches) == len(loader) == 3
    inputs, labels = (torch.cat(part) for part in zip(*batches, strict=True))
    assert sorted(labels.tolist()) == list(range(10))
    mean, std = (torch.tensor(n)[:, None, None] for n in (config.mean, config.std))
    torch.testing.assert_close(inputs, (images[labels] / 255 - mean) / std)


def test_rounding_moves_no_weight_by_more_than_half_a_step() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 5))
    with torch.no_grad():
        model[0].weight.copy_(numbers(8, 3, 3, 3))
    made = few_images.nearest(model, 0.5)
    before, after = made.layout.gather(model), made.values()
    book = made.codebook
    step = float((book[1:] - book[:-1]).min())
    assert 0.25 < step / float(before.square().mean().sqrt()) <= 0.5
    assert torch.equal(torch.round(book / step) * step, book)
    assert float((after - before).abs().max()) <= step / 2


def test_every_row_stores_the_rest_of_the_network_alike() -> None:
    for name, (_, what) in few_images.rows().items():
        if isinstance(what, Config):
            assert what.finish.fold_batchnorm, name
            assert what.finish.uncompressed_dtype == "tf32", name


def test_rows_with_kept_statistics_differ_in_nothing_else() -> None:
    known = few_images.rows()
    pairs = [(known[name.removesuffix("-kept")][1], known[name][1]) for name in known if "kept" in name]
    assert len(pairs) == 5
    for plain, kept in pairs:
        assert isinstance(plain, Config)
        assert isinstance(kept, Config)
        assert kept.finish.keeps_statistics
        assert not plain.finish.keeps_statistics
        assert plain.override({"finish.reestimate_epochs": None}) == kept


def test_networks_are_made_in_one_place_and_scored_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The place that trains has no labelled images, and the one that scores needs no others."""

    def made(name: str) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, 16), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
        )

    monkeypatch.setattr(few_images.models, "create", made)
    monkeypatch.setattr(few_images.models, "load_weights", lambda model, path: None)
    config = DataConfig((0.5,) * 3, (0.5,) * 3, 224)
    monkeypatch.setattr(few_images.models, "data_config", lambda *_: config)
    draw = np.random.default_rng(0)
    for place, kinds in (("train", ["unlabelled"]), ("test", ["val/a", "val/b"])):
        for kind in kinds:
            (tmp_path / place / kind).mkdir(parents=True)
            for number in range(4):
                pixels = draw.integers(0, 256, (224, 224, 3), dtype=np.uint8)
                (tmp_path / place / kind / f"{number}.jpeg").write_bytes(_jpeg(pixels))
    files, out = tmp_path / "files", tmp_path / "out.jsonl"
    names = ["kmeans-0", "lsq-kept", "nearest-0.5"]

    def run(place: str, *more: str) -> None:
        start = [
            "few_images.py",
            "--data",
            str(tmp_path / place),
            "--weights",
            str(tmp_path),
            "--device",
            "cpu",
        ]
        monkeypatch.setattr("sys.argv", [*start, "--networks", "tiny", "--rows", ",".join(names), *more])
        few_images.main()

    run("train", "--save", str(files), "--seed", "3")
    assert "top1" not in json.loads(capsys.readouterr().out.splitlines()[0])
    run("test", "--saved", str(files), "--out", str(out))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["row"], line["seed"], line["images"]) for line in lines] == [
        ("kmeans-0", 3, 0),
        ("lsq-kept", 3, 4),
        ("nearest-0.5", 3, 0),
    ]
    for line in lines:
        assert line["scored"] == 8
        assert line["file_bytes"] == (files / f"tiny_{line['row']}.pwfn").stat().st_size
    assert len(few_images.table(out)) == 2 + 1 + 3 + 2  # heads, the original, the rows, and below


def test_the_table_has_the_last_line_of_each_row_in_a_fixed_order(tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    assert len(few_images.table(path)) == 1  # says that nothing is measured
    path.write_text("")
    assert len(few_images.table(path)) == 1
    line: dict[str, Any] = {
        "network": "mobilenet_v2",
        "row": "lsq",
        "label": "LSQ",
        "seed": 0,
        "images": 2000,
        "scored": 3000,
        "top1_start": 0.72,
        "top1": 0.6,
        "agreement": 0.8,
        "kl": 0.25,
        "entropy_bits": 4.0,
        "unique": 1234,
        "file_bytes": 1_500_000,
        "fp32_bytes": 14_000_000,
        "seconds": 12.34,
        "device": "a GPU",
        "versions": {"torch": "2.0"},
        "commit": "0123456789abcdef",
    }
    quick = {**line, "row": "quick", "label": "quick", "images": 1024, "top1": 0.7}
    coded = {**line, "row": "nncodec-24", "label": "NNCodec", "seconds": None}
    lines = ({**line, "top1": 0.1}, coded, line, quick)
    path.write_text("".join(json.dumps(own) + "\n" for own in lines))
    _, _, *rows, _, below = few_images.table(path)
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[1] for row in cells] == ["original, float32", "quick", "LSQ", "NNCodec"]
    assert [row[3] for row in cells] == ["72.00", "70.00", "60.00", "60.00"]
    assert cells[2][2:] == ["2,000", "60.00", "12.00", "80.00", "0.250", "4.00", "1,234", "1,500,000", "12.3"]
    assert cells[3][-1] == "–"
    assert all(len(row) == len(few_images.HEADS) for row in cells)
    assert "3,000" in below
