import bz2
import dataclasses
import gzip
import shutil
from pathlib import Path

import numpy as np
import pytest

from rankgrad.data.catalogue import CATALOGUE, SPLITS, Counts, recognise
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.prepare import prepare

MQ2008 = Path(__file__).resolve().parents[3] / "shared" / "data" / "mq2008"
needs_mq2008 = pytest.mark.skipif(not MQ2008.is_dir(), reason="MQ2008 is not beside this checkout")


def text(features, *, queries=4, documents=3, first_query=1, label=1):
    lines = [
        f"{label if d == 0 else 0} qid:{first_query + q} "
        + " ".join(f"{i}:{(q + d + i) % 7}" for i in range(1, features + 1))
        for q in range(queries)
        for d in range(documents)
    ]
    return "\n".join(lines) + "\n"


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = content.encode()
        data = gzip.compress(data) if path.suffix == ".gz" else bz2.compress(data) if path.suffix == ".bz2" else data
        path.write_bytes(data)
    return folder


def splits(pattern, *args, **kwargs):
    return {pattern.format(split): text(*args, first_query=1 + 100 * i, **kwargs) for i, split in enumerate(SPLITS)}


def test_the_catalogue_holds_the_nine_and_its_sums_agree():
    assert set(CATALOGUE) == {
        *("web30k", "web10k", "istella", "istella-s", "istella-x"),
        *("yahoo", "mq2007", "mq2008", "ohsumed"),
    }
    for name, entry in CATALOGUE.items():
        assert entry.source.startswith("http"), name
        assert entry.licence
        assert set(entry.fold1) <= set(entry.files), name
        for what in ("queries", "documents"):
            parts = [getattr(counts, what) for counts in entry.fold1.values()]
            if parts:
                assert sum(parts) == getattr(entry.total, what), name


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (splits("MSLR-WEB30K/Fold1/{}.txt", 136), "web30k"),
        (splits("MSLR-WEB10K/Fold1/{}.txt", 136), "web10k"),
        (splits("here/Fold1/{}.txt", 136), "web30k"),
        (splits("here/{}.txt.gz", 136), "web30k"),
        ({"istella/full/train.txt": text(220), "istella/full/test.txt": text(220)}, "istella"),
        (splits("here/sample/{}.txt", 220), "istella-s"),
        (splits("istella-x/{}.txt", 220), "istella-x"),
        (splits("here/Fold1/{}.txt", 46), "mq2007"),
        ({f"here/Fold1/{s}.txt": text(46, first_query=10_001) for s in SPLITS}, "mq2008"),
        (splits("OHSUMED/QueryLevelNorm/Fold1/{}.txt", 45), "ohsumed"),
        ({f"OHSUMED/Fold1/{s}set.txt": text(45) for s in ("training", "validation", "test")}, "ohsumed"),
        ({f"yahoo/set1.{s}.txt": text(519) for s in ("train", "valid", "test")}, "yahoo"),
        (splits("here/{}.txt", 12), None),
        ({f"here/{s}.svm.bz2": text(136) for s in ("train", "valid", "test")}, "web30k"),
        ({f"here/{s}.TXT": text(136) for s in ("train", "vali", "test")}, "web30k"),
        (splits("here/Fold1/{}.letor", 136), "web30k"),
        (splits("here/Fold1/{}.dat.gz", 45), "ohsumed"),
        ({"web10k/train.svm": text(136), "web10k/test.svm": text(136)}, "web10k"),
        ({f"here/{s}.letor": text(5) for s in ("train", "validation", "test")}, None),
        ({f"here/{s}.dat": text(5) for s in ("train", "vali", "test")}, None),
    ],
)
def test_layouts_are_recognised(files, expected, tmp_path):
    folder = write(tmp_path, files) / next(iter(files)).split("/")[0]
    layout = recognise(folder)
    assert layout.dataset == expected
    assert [path for paths in layout.files.values() for path in paths] == [tmp_path / name for name in files]
    assert set(layout.files) == {next(s for s in SPLITS if s in Path(name).name) for name in files}


def test_size_tells_web10k_where_the_name_does_not(tmp_path, monkeypatch):
    folder = write(tmp_path / "some" / "other" / "name", splits("Fold1/{}.txt", 136))
    small = dataclasses.replace(CATALOGUE["web10k"], total=Counts(12, 40))
    monkeypatch.setitem(recognise.__globals__, "CATALOGUE", {**CATALOGUE, "web10k": small})
    assert recognise(folder).dataset == "web10k"


def test_another_fold_is_found_by_number_or_by_the_folder_itself(tmp_path):
    write(tmp_path, splits("Fold1/{}.txt", 136) | splits("Fold3/{}.txt", 136))
    assert recognise(tmp_path, fold=3).files["train"] == (tmp_path / "Fold3" / "train.txt",)
    assert recognise(tmp_path / "Fold3").fold == 3
    assert recognise(tmp_path / "Fold3", fold=3).fold == 3
    with pytest.raises(ValueError, match=r"Fold3 is fold 3; fold 2 "):
        recognise(tmp_path / "Fold3", fold=2)


@needs_mq2008
@pytest.mark.parametrize(
    ("fold", "train", "vali", "test"), [(1, "123", "4", "5"), (2, "234", "5", "1"), (4, "451", "2", "3")]
)
def test_mq2008_parts_make_the_official_folds(fold, train, vali, test):
    layout = recognise(MQ2008, fold=fold)
    assert layout.dataset == "mq2008"
    digits = {split: "".join(path.name[1] for path in paths) for split, paths in layout.files.items()}
    assert digits == {"train": train, "vali": vali, "test": test}


@needs_mq2008
def test_mq2008_is_prepared_and_agrees_with_the_published_counts(tmp_path):
    seen = []
    summary = prepare(MQ2008, out=tmp_path / "out", fold=2, progress=lambda done, total: seen.append((done, total)))
    assert (summary.dataset, summary.fold, summary.differences) == ("mq2008", 2, ())
    assert sum(d.queries for d in summary.splits.values()) == 784
    assert sum(d.documents for d in summary.splits.values()) == 15_211
    assert "agrees with the published counts" in (tmp_path / "out" / "summary.txt").read_text()
    assert summary.notes == ()
    train = RankingDataset.open(tmp_path / "out" / "train")
    assert train.describe() == summary.splits["train"]
    assert {"dataset": "mq2008", "fold": 2, "split": "train"}.items() <= train.provenance.items()
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == sum(path.stat().st_size for path in MQ2008.iterdir())


@needs_mq2008
def test_mq2008_with_a_part_cut_short_is_told(tmp_path):
    for path in MQ2008.iterdir():
        shutil.copy(path, tmp_path)
    lines = gzip.decompress((tmp_path / "S5.txt.gz").read_bytes()).splitlines(keepends=True)
    (tmp_path / "S5.txt.gz").write_bytes(gzip.compress(b"".join(lines[:-1])))
    summary = prepare(tmp_path)
    assert summary.differences == ("all splits together: 15,210 documents; published are 15,211",)
    assert "differs from the published counts" in (tmp_path / "prepared" / "summary.txt").read_text()


def test_differences_are_told_split_by_split(tmp_path):
    summary = prepare(write(tmp_path, splits("MSLR-WEB30K/Fold1/{}.txt", 136, label=5)) / "MSLR-WEB30K")
    assert "train: 4 queries; published are 18,919" in summary.differences
    assert "vali: 12 documents; published are 747,218" in summary.differences
    assert "test: 0 queries without a relevant document; published are 189" in summary.differences
    assert "all splits together: 3 documents in the longest list; published are 1,251" in summary.differences
    assert "train: a label 5; published labels end at 4" in summary.differences


def test_another_width_and_missing_splits_are_differences(tmp_path):
    write(tmp_path, splits("narrow/{}.txt", 46) | {"part/train.txt": text(136, queries=8)})
    assert prepare(tmp_path / "narrow", dataset="web30k").differences[0] == "features: 46; published are 136"
    found = prepare(tmp_path / "part").differences
    assert found[:2] == ("vali: missing", "test: missing")
    write(tmp_path, {f"yahoo/set1.{s}.txt": text(519) for s in ("train", "valid", "test")})
    assert not any(found.startswith("features") for found in prepare(tmp_path / "yahoo").differences)


def test_one_query_cannot_be_set_aside_from(tmp_path):
    write(tmp_path, {"one/train.txt": text(3, queries=1), "two/train.txt": text(3, queries=2)})
    with pytest.raises(ValueError, match="one query .*vali.txt"):
        prepare(tmp_path / "one")
    assert [d.queries for d in prepare(tmp_path / "two").splits.values()] == [1, 1]


def test_what_was_prepared_stays_until_the_new_is_whole(tmp_path):
    write(tmp_path, splits("{}.txt", 3))
    prepare(tmp_path)
    before = sorted(path.read_bytes() for path in (tmp_path / "prepared").rglob("*.*"))
    files = sorted(path.name for path in tmp_path.iterdir())
    (tmp_path / "test.txt").write_text(text(3) + "oops\n")
    with pytest.raises(ValueError, match=r"test.txt:13:1"):
        prepare(tmp_path, overwrite=True)
    assert sorted(path.read_bytes() for path in (tmp_path / "prepared").rglob("*.*")) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    with pytest.raises(ValueError, match=r"test.txt:13:1"):
        prepare(tmp_path, out=tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    write(tmp_path, splits("{}.txt", 3))
    assert len(prepare(tmp_path, out=tmp_path / "new").splits) == 3


def test_without_a_validation_file_a_quarter_of_train_is_set_aside(tmp_path):
    write(tmp_path, {"full/train.txt": text(220, queries=8), "full/test.txt": text(220, first_query=50)})
    first = prepare(tmp_path, out=tmp_path / "a")
    prepare(tmp_path, out=tmp_path / "another")
    parts = [RankingDataset.open(tmp_path / "a" / split) for split in SPLITS]
    assert [len(part) for part in parts] == [6, 2, 4]
    assert not set(parts[0].query_ids) & set(parts[1].query_ids)
    again = RankingDataset.open(tmp_path / "another" / "vali")
    assert (again.query_ids == parts[1].query_ids).all()
    assert "train: 8 queries; published are 23,219" in first.differences
    assert any("quarter of the train queries" in note for note in first.notes)


def test_istellas_absurd_values_are_clamped_and_told(tmp_path):
    absurd = text(220).replace(" 3:", " 3:1.797e308 #", 1)
    summary = prepare(write(tmp_path, {"train.txt": absurd, "test.txt": text(220)}), dataset="istella")
    assert "1 values beyond float32 were clamped" in summary.notes


def test_splits_of_an_unnamed_dataset_get_one_width(tmp_path):
    write(tmp_path, {"train.txt": text(3), "valid.txt": text(5), "test.txt": text(4)})
    assert prepare(tmp_path).dataset is None
    for split, width in zip(SPLITS, (3, 5, 4)):
        features = RankingDataset.open(tmp_path / "prepared" / split).features
        assert features.shape == (12, 5)
        assert (features[:, width:] == 0).all()
        assert features[:, :width].any(axis=0).all()


def test_prepared_data_is_replaced_only_on_request(tmp_path):
    write(tmp_path, {"train.txt": text(3, queries=8), "valid.txt": text(3), "test.txt": text(3)})
    prepare(tmp_path)
    with pytest.raises(ValueError, match=r"prepared .*\(out\).*\(overwrite\)"):
        prepare(tmp_path)
    (tmp_path / "test.txt").unlink()
    summary = prepare(tmp_path, overwrite=True)
    assert set(summary.splits) == {"train", "vali"}
    assert sorted(path.name for path in (tmp_path / "prepared").iterdir()) == ["summary.txt", "train", "vali"]


def test_a_folder_with_other_things_in_it_is_never_emptied(tmp_path):
    write(tmp_path, splits("data/{}.txt", 3) | {"home/thesis.tex": "years of work"})
    with pytest.raises(ValueError, match=r"home holds thesis\.tex.*\(out\)"):
        prepare(tmp_path / "data", out=tmp_path / "home", overwrite=True)
    write(tmp_path, {"other/train/notes.txt": "mine"})
    with pytest.raises(ValueError, match=r"other holds train.*\(out\)"):
        prepare(tmp_path / "data", out=tmp_path / "other", overwrite=True)
    assert (tmp_path / "home" / "thesis.tex").exists()
    assert (tmp_path / "other" / "train" / "notes.txt").exists()


@pytest.mark.parametrize(
    ("files", "arguments", "message"),
    [
        ({"data.csv": "a,b"}, {}, "train.txt"),
        (splits("{}.txt", 3), {"dataset": "web3k"}, "'web3k'.*catalogue.*web30k"),
        (splits("{}.txt", 3), {"fold": 6}, "fold 6.* 1 to 5"),
        (splits("{}.txt", 220), {"fold": 2}, "fold 2 of istella-s"),
        (splits("{}.txt", 3) | {"train.txt.gz": text(3)}, {}, "train.txt and train.txt.gz"),
        (splits("{}.txt", 3) | {"valid.txt": text(3)}, {}, "vali.txt and valid.txt"),
        ({"train.txt": "1 qid:1 1:nan\n"}, {}, "train.txt:1:"),
        (splits("{}.txt", 137), {"dataset": "web30k"}, "train.txt:1:"),
    ],
)
def test_what_cannot_be_prepared_is_refused_and_nothing_is_lost(files, arguments, message, tmp_path):
    write(tmp_path, files)
    with pytest.raises(ValueError, match=message):
        prepare(tmp_path, **arguments)
    with pytest.raises(ValueError, match="absent does not exist"):
        prepare(tmp_path / "absent")


def test_the_summary_is_plain_values_for_json(tmp_path):
    values = prepare(write(tmp_path, splits("{}.txt", 3))).as_dict()
    assert values["splits"]["train"]["queries"] == 4
    assert values["folder"] == str(tmp_path / "prepared")
    assert not any(isinstance(v, np.generic | Path) for v in values["splits"]["train"].values())
