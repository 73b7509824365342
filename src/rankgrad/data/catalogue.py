"""The public ranking datasets: files, published counts, quirks, where a person gets them. Facts only, no code.

Counts are held only where they are certain; None is not known and not checked. Nothing here is ever downloaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SPLITS = ("train", "vali", "test")


@dataclass(frozen=True)
class Counts:
    """Published numbers of a split or a whole dataset; None where unknown."""

    queries: int | None = None
    documents: int | None = None
    empty_queries: int | None = None
    longest: int | None = None


@dataclass(frozen=True)
class Entry:
    """One public dataset. `files` maps split to its path under the unpacked folder, `{fold}` where there are folds."""

    title: str
    files: Mapping[str, str]
    features: int
    max_label: int
    scaling: str
    source: str
    licence: str
    total: Counts
    fold1: Mapping[str, Counts] = field(default_factory=dict)  # of the first fold, or of the only one
    folds: int = 1
    quirks: tuple[str, ...] = ()
    features_used: int | None = None  # how many of the features occur at all, where not every one does

    @property
    def used(self) -> int:
        """A file's largest index is at least this."""
        return self.features_used or self.features


_FOLDS = {split: f"Fold{{fold}}/{split}.txt" for split in SPLITS}
_MSLR: dict[str, Any] = {
    "files": _FOLDS,
    "folds": 5,
    "features": 136,
    "max_label": 4,
    "scaling": "web30k",
    "source": "https://www.microsoft.com/en-us/research/project/mslr/",
    "licence": "Microsoft Research licence agreement, research use",
}
_ISTELLA: dict[str, Any] = {
    "features": 220,
    "max_label": 4,
    "scaling": "auto",
    "source": "http://quickrank.isti.cnr.it/istella-dataset/",
    "licence": "Istella LETOR licence agreement, non-commercial use",
    "quirks": ("missing numbers are written 1.797e308; they are clamped on reading and tamed by the scaling",),
}
_LETOR: dict[str, Any] = {
    "folds": 5,
    "max_label": 2,
    "scaling": "standard",
    "source": "https://www.microsoft.com/en-us/research/project/letor-learning-rank-information-retrieval/",
    "licence": "Microsoft Research LETOR, research use",
}
_NULL_QUIRK = "take the QueryLevelNorm or MIN version: the NULL version holds the word NULL and is refused"

# Where the first lines fit several entries, the first listed is taken unless the folder's name or size says otherwise.
CATALOGUE: Mapping[str, Entry] = {
    "web30k": Entry(
        title="MSLR-WEB30K",
        total=Counts(31_531, 3_771_125, longest=1_251),
        fold1={
            "train": Counts(18_919, 2_270_296, empty_queries=602),
            "vali": Counts(6_306, 747_218, empty_queries=191),
            "test": Counts(6_306, 753_611, empty_queries=189),
        },
        **_MSLR,
    ),
    "web10k": Entry(
        title="MSLR-WEB10K",
        total=Counts(10_000, 1_200_192),
        fold1={
            "train": Counts(6_000, 723_412),
            "vali": Counts(2_000, 235_259),
            "test": Counts(2_000, 241_521),
        },
        **_MSLR,
    ),
    "istella": Entry(
        title="Istella LETOR (full)",
        files={"train": "full/train.txt", "test": "full/test.txt"},
        total=Counts(33_018, 10_454_629, empty_queries=50),
        fold1={"train": Counts(23_219, 7_325_625), "test": Counts(9_799, 3_129_004)},
        **_ISTELLA,
    ),
    "istella-s": Entry(
        title="Istella-S LETOR",
        files={split: f"sample/{split}.txt" for split in SPLITS},
        total=Counts(33_018, 3_408_630),
        fold1={
            "train": Counts(19_245, 2_043_304),
            "vali": Counts(7_211, 684_076),
            "test": Counts(6_562, 681_250),
        },
        **_ISTELLA,
    ),
    "istella-x": Entry(
        title="Istella-X LETOR",
        files={split: f"{split}.txt" for split in SPLITS},
        total=Counts(10_000, 26_791_447),
        **_ISTELLA,
    ),
    "yahoo": Entry(
        title="Yahoo! Learning to Rank Challenge, set 1",
        files={"train": "set1.train.txt", "vali": "set1.valid.txt", "test": "set1.test.txt"},
        features=700,
        features_used=519,
        max_label=4,
        scaling="standard",
        source="https://webscope.sandbox.yahoo.com/ (dataset C14)",
        licence="Yahoo Webscope agreement, non-commercial research",
        total=Counts(29_921, 709_877),
        fold1={
            "train": Counts(19_944, 473_134),
            "vali": Counts(2_994, 71_083),
            "test": Counts(6_983, 165_660),
        },
        quirks=("features lie in [0, 1] already; of the 700, 519 are used by set 1",),
    ),
    "mq2008": Entry(
        title="LETOR 4.0 MQ2008",
        files=_FOLDS,
        features=46,
        total=Counts(784, 15_211, empty_queries=220, longest=121),
        quirks=(_NULL_QUIRK, "the five parts S1 to S5 are recognised too; fold f trains on three parts from Sf"),
        **_LETOR,
    ),
    "mq2007": Entry(
        title="LETOR 4.0 MQ2007",
        files=_FOLDS,
        features=46,
        total=Counts(1_692, 69_623),
        quirks=(_NULL_QUIRK,),
        **_LETOR,
    ),
    "ohsumed": Entry(
        title="LETOR 3.0 OHSUMED",
        files={split: f"Fold{{fold}}/{name}set.txt" for split, name in zip(SPLITS, ("training", "validation", "test"))},
        features=45,
        total=Counts(106, 16_140),
        quirks=(_NULL_QUIRK,),
        **_LETOR,
    ),
}
