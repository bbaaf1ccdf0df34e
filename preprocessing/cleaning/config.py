"""Settings of the clean stage."""

from typing import Literal

from pydantic import Field, model_validator

from contracts.configuration import Settings, execution
from preprocessing.config import MIB, SourceFormat, TextUnit


class MinHashConfig(Settings):
    """Near duplicates by MinHash signatures and locality-sensitive hashing (Broder 1997).

    Two documents whose n-grams have the Jaccard similarity s become candidates with the probability
    1 - (1 - s^r)^b, where b is `bands` and r is `permutations / bands`.
    """

    ngram: int = Field(5, ge=1, le=64, description="Words in an n-gram; a document is the set of its n-grams.")
    permutations: int = Field(
        120, ge=1, le=4096, description="Numbers in a signature, which takes twice as many bytes of disk a document."
    )
    bands: int = Field(
        20,
        ge=1,
        description="Rows of numbers; documents that have one row in common are candidates. 20 rows of 6 find 98 % of "
        "pairs at a similarity of 0.75, 99.8 % at 0.8, 43 % at 0.55; their estimated similarity then decides.",
    )
    threshold: float = Field(
        0.75, gt=0, le=1, description="Candidates whose estimated Jaccard similarity is lower are no duplicates."
    )
    seed: int = Field(1, ge=0, lt=2**32, description="Seed of the permutations.")

    @model_validator(mode="after")
    def _bands_are_of_one_size(self) -> "MinHashConfig":
        if self.permutations % self.bands:
            raise ValueError(
                f"permutations is {self.permutations} and bands is {self.bands}: the bands must be of one size, as "
                "120 in 20 or 128 in 16."
            )
        return self


class CleanConfig(Settings):
    """Leave documents out of a corpus, or mend them: each step optional, counted and listed.

    Steps, in this order: length, quality, languages, decontamination, exact duplicates, near
    duplicates, personal data.
    """

    sources: tuple[str, ...] = execution(
        (), description="Files, folders, globs, addresses or hub datasets to clean, where no corpus artifact is given."
    )
    text_key: str = Field("text", description="Key of the text; dots go into nested records.")
    subset_key: str = Field("meta.pile_set_name", description="Key of the subset name; records may lack it.")
    format: SourceFormat = Field(
        "auto", description="What files of lines hold: JSON objects (jsonl) or plain text. auto: by name, JSON else."
    )
    text_unit: TextUnit = Field("document", description="What is one document in plain text.")
    preset: Literal["pile"] | None = execution(
        None, description="pile: `sources` is the folder of the Pile, whose files are taken by name."
    )
    on_error: Literal["stop", "quarantine"] = Field(
        "stop", description="What a bad record does: stop the stage, or be set aside in rejects.jsonl."
    )
    max_rejects: float | None = Field(
        None,
        ge=0,
        description="With on_error quarantine: more bad records than this fail the stage. Below 1: a share of all "
        "lines; 1 or more: a count; 0: none. Empty: any number.",
    )
    min_characters: int = Field(0, ge=0, description="Shorter documents are left out.")
    max_characters: int | None = Field(None, ge=1, description="Longer documents are left out. Empty: none is.")
    quality: tuple[Literal["gopher", "c4"], ...] = Field(
        (),
        description="Rules of quality, in this order: gopher, c4. They were made for English web pages.",
    )
    languages: tuple[str, ...] = Field(
        (), description="Keep documents in these languages only (ISO 639-1: en, de, ...). Needs shardline[clean]."
    )
    min_language_score: float = Field(
        0.5, ge=0, le=1, description="Documents whose language is less sure than this are left out too."
    )
    decontaminate: tuple[str, ...] = execution(
        (), description="Evaluation sets, as any sources: documents that share n-grams with them are left out."
    )
    decontaminate_keys: tuple[str, ...] = Field(
        ("text",), min_length=1, description="Keys of their records that hold text, such as question and answer."
    )
    decontaminate_heldout: bool | None = Field(
        None,
        description="Whether the held-out part of a corpus artifact is an evaluation set. Empty: if others are named.",
    )
    ngram: int = Field(13, ge=1, le=64, description="Words in an n-gram of decontamination: 13 as GPT-3, 8 finds more.")
    max_share: float = Field(
        0.0, ge=0, lt=1, description="Share of a document's n-grams that evaluation sets may have. 0: not one."
    )
    exact: bool = Field(False, description="Of documents with the same text, keep the first.")
    minhash: MinHashConfig | None = Field(
        None, description="Of documents with nearly the same text, keep the first. Needs shardline[clean]."
    )
    mask_personal_data: bool = Field(
        False, description="Replace e-mail addresses and public IP addresses by ones that are nobody's."
    )
    part_bytes: int = Field(
        256 * MIB, ge=1, description="Input on disk, in bytes, that one worker does by itself; each gives one file."
    )
    workers: int | None = execution(
        None,
        ge=1,
        le=1024,
        description="Worker processes, one thread each. Empty: one per core, none for less than 1 MiB of input.",
    )

    @property
    def has_steps(self) -> bool:
        """Any step is on."""
        lengths = self.min_characters or self.max_characters
        rules = self.quality or self.languages or self.decontaminate or self.decontaminate_heldout
        return bool(lengths or rules or self.exact or self.minhash or self.mask_personal_data)

    @model_validator(mode="after")
    def _limits_are_usable(self) -> "CleanConfig":
        if self.max_rejects is not None and self.on_error != "quarantine":
            raise ValueError("max_rejects needs on_error: quarantine; with stop, the first bad record ends the stage.")
        if self.max_rejects is not None and self.max_rejects > 1 and not self.max_rejects.is_integer():
            raise ValueError(f"max_rejects is {self.max_rejects:g}; give a share below 1 or a whole number of records.")
        if self.max_characters is not None and self.max_characters < self.min_characters:
            raise ValueError(f"min_characters ({self.min_characters}) is above max_characters ({self.max_characters}).")
        if len(set(self.quality)) < len(self.quality):
            raise ValueError("quality names a rule twice.")
        return self
