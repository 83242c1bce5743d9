"""Fields that every head kind has."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from .objectives import check_loss

Tap = Annotated[int, Field(ge=0)]


class HeadConfig(BaseModel):
    """Attributes:
    depth: K, tokens drafted in a chain.
    taps: target layers read beside the final state: 0 is the embeddings, i the output of
        layer i-1, the number of layers the raw output of the last one; larger values shift
        down to fit.
    draft_vocab: D most frequent ids of the distillation data; None drafts over all ids.
    draft_coverage: fewer ids than that where they make up this share of the data's tokens.
    low_rank: r of an lm_head hidden -> r -> ids, r at most hidden, trained instead of the target's
        frozen one, so that a draft over all ids (`draft_vocab: null`) costs little; 0: none.
    prior: rank of a Markov prior, which adds what the previous token alone says; 0: none.
    loss: an objective of `objectives.TERMS`, `accepted_length`, or a mix {name: weight}.
    lk_eta: eta of `lk_hybrid`, to be set with it alone; its paper takes 3, and 10 for Medusa.
    decay: weight of depth k's loss is decay^k (Medusa, arXiv 2401.10774, section 2.2.1).
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    kind: str
    depth: int = Field(4, ge=1, le=16)
    taps: list[Tap] = Field(default_factory=list)
    draft_vocab: int | None = Field(8192, ge=1)
    draft_coverage: float | None = Field(None, gt=0, le=1)
    low_rank: int = Field(0, ge=0)
    prior: int = Field(0, ge=0)
    loss: Annotated[str | dict[str, float], BeforeValidator(check_loss)] = "kl"
    lk_eta: float = Field(3.0, gt=0)
    decay: float = Field(0.8, gt=0, le=1)

    @property
    def has_draft_vocab(self) -> bool:
        """Is a draft vocabulary asked for, by size or by coverage?"""
        return self.draft_vocab is not None or self.draft_coverage is not None

    @model_validator(mode="after")
    def _one_lm_head(self) -> Self:
        if self.low_rank and getattr(self, "lm_head", "shared") == "own":
            raise ValueError("low_rank and lm_head: own are two lm_heads, choose one")
        return self

    @model_validator(mode="after")
    def _eta_is_used(self) -> Self:
        if (
            "lk_hybrid" not in self.loss
            and self.lk_eta != type(self).model_fields["lk_eta"].default
        ):
            raise ValueError(f"lk_eta is {self.lk_eta}, and there is no lk_hybrid in loss")
        return self
