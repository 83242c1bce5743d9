"""The sections of a config that say what is learned from."""

from __future__ import annotations

import os
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

UserPath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path in which ~ is the home folder, or a name that is none, such as none or hub:OWNER/NAME."""


class Section(BaseModel):
    """Strict: unknown keys, text for numbers, booleans for numbers, nan and inf are errors."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


class Answer(Section):
    """How the target answers every prompt once; temperature 0 is greedy."""

    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)


class FeaturesConfig(Section):
    """The target's hidden states on disk.

    Attributes:
        folder: default OUTPUT_DIR/features.  Runs may share it: each cache has a subfolder of its
            own, which stays until it is deleted by hand.
        dtype: what states are rounded to; see rounding.py.
        max_gb: a run whose cache would be larger is refused.
        cache_only: train with the target's embedding and lm_head alone in memory; the cache is
            filled by scripts/prepare_data.py.  One target a folder.
    """

    cache: bool = True
    folder: UserPath | None = None
    dtype: Literal["float32", "bfloat16", "int8"] = "bfloat16"
    max_gb: float = Field(default=20.0, gt=0)
    cache_only: bool = False

    @model_validator(mode="after")
    def _cache_is_there(self) -> Self:
        if self.cache_only and not self.cache:
            raise ValueError("cache_only=true needs cache=true")
        return self


class DataConfig(Section):
    """What is learned from.  Files are JSON lines, a JSON array or Parquet; hub:OWNER/NAME names a
    dataset of the hub, which scripts/prepare_data.py fetches.

    Attributes:
        prompts: what the target answers in scripts/prepare_data.py.
        file: what is trained on, prepared answers, chats or text; default
            OUTPUT_DIR/answers.jsonl.
        limit: rows read at most.
        on_truncated: a JSON array that is cut off is an error, or its whole rows are used.
        answers: one answer to each prompt for each entry.
        temperatures: train on the answers drawn at these alone; held-out ones stay. None: on all.
        max_length: tokens of a row; longer ones are cut or dropped, as `overlong` says.
        eval_prompts: prompts held out from training with all their rows.
        answer_batch_size: prompts answered together.
        answers_drafter: what drafts the answers, for speed: none, ngram, or a folder of heads.
        pack: documents of a batch share rows of max_length.
        bucket: that many rows of like length follow each other; 1 leaves the order to chance.
    """

    prompts: UserPath | None = None
    file: UserPath | None = None
    limit: int | None = Field(default=None, ge=1)
    on_truncated: Literal["error", "keep_whole"] = "error"
    answers: list[Answer] = Field(default_factory=lambda: [Answer()], min_length=1)
    temperatures: list[Annotated[float, Field(ge=0)]] | None = Field(default=None, min_length=1)
    max_new_tokens: int = Field(default=128, ge=1)
    max_length: int = Field(default=512, ge=3)
    overlong: Literal["cut", "drop"] = "cut"
    eval_prompts: int = Field(default=32, ge=0)
    answer_batch_size: int = Field(default=48, ge=1)
    answers_drafter: UserPath = "none"
    pack: bool = False
    bucket: int = Field(default=1, ge=1)
    features: FeaturesConfig = FeaturesConfig()

    @property
    def pack_length(self) -> int | None:
        """Tokens of a row that documents share; None where each has its own."""
        return self.max_length if self.pack else None

    @model_validator(mode="after")
    def _temperatures_are_answered(self) -> Self:
        # A law that top-p has cut is that of no temperature.
        drawn = {a.temperature for a in self.answers if a.temperature == 0 or a.top_p == 1}
        if self.prompts is not None and (missing := {*(self.temperatures or [])} - drawn):
            shown = ", ".join(map(str, sorted(drawn))) or "none"
            raise ValueError(
                f"temperatures: no answer is drawn at {min(missing)} without top_p; there are: "
                f"{shown}"
            )
        return self

    @model_validator(mode="after")
    def _answers_have_a_file(self) -> Self:
        if self.prompts is not None and (self.file or "").startswith("hub:"):
            raise ValueError("answers to `prompts` cannot be written to the hub dataset in `file`")
        return self
