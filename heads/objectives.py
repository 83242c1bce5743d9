"""What a head's draft law q is taught about the target's law p.

An objective is a weighted mix of terms, all to be minimised.  Over a draft vocabulary D, q lives on
D alone: KL and reverse KL compare it with p renormalised on D, while everything that is an
acceptance takes p as it is, since the verifier does.

Shape suffixes: M rows, U distinct target positions, W hidden width, D draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .errors import nearest

CHUNK = 2**21
"""Logits held at once, in elements: the memory of a loss does not grow with the batch."""

Project = Callable[[Tensor], Tensor]


def wide(logits: Tensor) -> Tensor:
    """At least float32: a log-softmax in bf16 loses the tail that a loss is about."""
    return logits.to(torch.promote_types(torch.float32, logits.dtype))


class TargetLaws:
    """The target's laws at positions of the text, without gradients.

    Args:
        hidden: states after the final norm, flat over batch and time [.., W].
        teachers_U: the positions that are looked at.
        project: to draft-vocabulary logits.
        project_all: to logits over all ids; None where `project` gives these.
        log_z: see `normalisers`, at every position [..]; None where it is to be computed.
    """

    def __init__(
        self,
        hidden: Tensor,
        teachers_U: Tensor,
        project: Project,
        project_all: Project | None,
        log_z: Tensor | None = None,
    ) -> None:
        self.hidden, self.teachers_U = hidden, teachers_U
        self.project, self.project_all, self._known = project, project_all, log_z

    @torch.no_grad()
    def log_p(self, teacher_M: Tensor) -> tuple[Tensor, Tensor]:
        """At sorted positions, [M, D] log p renormalised on D, and by what: [M] log sum_{v in D}
        exp(logit_v)."""
        teachers_U, place_M = teacher_M.unique_consecutive(return_inverse=True)
        logits_UD = wide(self.project(self.hidden[teachers_U]))
        log_inside_U = logits_UD.logsumexp(-1)
        return (logits_UD - log_inside_U[:, None])[place_M], log_inside_U[place_M]

    @cached_property
    def log_z(self) -> Tensor:
        """[..] log sum_v exp(logit_v) over all ids.  Where it is not known it costs the whole
        lm_head at every position of `teachers_U`, so it is computed when asked for, and once."""
        if self._known is not None:
            return self._known
        assert self.project_all is not None, "the draft vocabulary has all ids"
        return normalisers(self.hidden, self.teachers_U, self.project_all)


@torch.no_grad()
def normalisers(hidden: Tensor, rows_U: Tensor, project_all: Project) -> Tensor:
    """[N] log sum_v exp(logit_v) of states [N, W] at `rows_U`, 0 elsewhere, at least float32."""
    log_z = wide(torch.zeros_like(hidden[:, 0]))
    if len(rows_U):
        width = project_all(hidden[:1]).shape[-1]
        # Without gradients fewer tensors of this size exist at once.
        for at in rows_U.split(max(1, 2 * CHUNK // width)):
            log_z[at] = wide(project_all(hidden[at])).logsumexp(-1)
    return log_z


def known_normalisers(features: Mapping[str, Tensor]) -> Tensor | None:
    """`log_z` of `Features`, flat; None where it is missing or does not fit the logits that are
    computed here: autocast to another dtype than the states' rounds these otherwise, and what wraps
    a head (FSDP2) may have rounded `log_z` itself."""
    hidden, log_z = features["hidden"], features.get("log_z")
    if log_z is None or log_z.dtype.itemsize < torch.float32.itemsize:
        return None
    kind = hidden.device.type
    recast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != hidden.dtype
    return None if recast else log_z.flatten()


class Laws:
    """Draft and target laws of some loss rows, each part computed when it is first asked for, so
    that an objective pays for what it reads and no more.

    Args:
        logits_MD: the head's.
        target: the laws of all teachers.
        teacher_M: the rows' teachers, sorted.
        label_M: index in D of the text's token, -1 where D lacks it.
    """

    def __init__(
        self, logits_MD: Tensor, target: TargetLaws, teacher_M: Tensor, label_M: Tensor
    ) -> None:
        self.logits_MD, self.label_M = logits_MD, label_M
        self._target, self._teacher_M = target, teacher_M

    @cached_property
    def log_q_MD(self) -> Tensor:
        """log q."""
        return self.logits_MD.log_softmax(-1)

    @property
    def log_p_MD(self) -> Tensor:
        """log p renormalised on D."""
        return self._inside[0]

    @cached_property
    def log_mass_M(self) -> Tensor:
        """log sum_{v in D} p(v): what renormalising on D takes away."""
        log_inside_M = self._inside[1]
        if self._target.project_all is None:
            return torch.zeros_like(log_inside_M)
        return log_inside_M - self._target.log_z[self._teacher_M]

    @cached_property
    def _inside(self) -> tuple[Tensor, Tensor]:
        return self._target.log_p(self._teacher_M)

    @cached_property
    def log_acceptance_M(self) -> Tensor:
        """log alpha, alpha = sum_{v in D} min(p(v), q(v)): the chance that a token drawn from q is
        accepted (arXiv 2211.17192, corollary 3.6)."""
        log_p = self.log_p_MD + self.log_mass_M[:, None]
        return torch.minimum(log_p, self.log_q_MD).logsumexp(-1)

    @cached_property
    def log_ratio_M(self) -> Tensor:
        """log min(1, q(x) / p(x)) of the text's token x; -inf where D lacks it."""
        index = self.label_M.clamp(min=0)[:, None]
        log_q, log_p = (t.gather(-1, index)[:, 0] for t in (self.log_q_MD, self.log_p_MD))
        ratio = (log_q - log_p - self.log_mass_M).clamp(max=0)
        return torch.where(self.label_M >= 0, ratio, -torch.inf)


Term = Callable[[Laws], Tensor]
"""laws of M rows -> loss [M]."""


def ce(laws: Laws) -> Tensor:
    """-log q(x): cross-entropy on the token of the text (arXiv 2401.10774, equation 1).  A token
    outside D costs 0, since no change of the head could propose it."""
    label_M = laws.label_M
    loss_M = functional.nll_loss(laws.log_q_MD, label_M.clamp(min=0), reduction="none")
    return torch.where(label_M >= 0, loss_M, 0.0)


def kl(laws: Laws) -> Tensor:
    """KL(p || q) = sum p log(p / q), p renormalised on D (arXiv 1503.02531, up to p's entropy)."""
    return (laws.log_p_MD.exp() * (laws.log_p_MD - laws.log_q_MD)).sum(-1)


def reverse_kl(laws: Laws) -> Tensor:
    """KL(q || p) = sum q log(q / p), p renormalised on D (arXiv 2306.08543): seeks a mode of p
    instead of covering all of it."""
    return (laws.log_q_MD.exp() * (laws.log_q_MD - laws.log_p_MD)).sum(-1)


def tv(laws: Laws) -> Tensor:
    """1 - alpha, which is the total variation distance of p and q (arXiv 2310.08461)."""
    return 1 - laws.log_acceptance_M.exp()


def lk(laws: Laws) -> Tensor:
    """-log alpha (arXiv 2602.23881): TV whose gradient does not vanish where alpha is small."""
    return -laws.log_acceptance_M


def lk_hybrid(laws: Laws, eta: float = 3.0) -> Tensor:
    """l KL + (1 - l) TV with l = exp(-eta sg[alpha]) of each row (arXiv 2602.23881): KL where the
    head is far from the target, TV once it is near."""
    share_M = (-eta * laws.log_acceptance_M.detach().exp()).exp()
    return share_M * kl(laws) + (1 - share_M) * tv(laws)


TERMS: dict[str, Term] = {
    "ce": ce,
    "kl": kl,
    "reverse_kl": reverse_kl,
    "tv": tv,
    "lk": lk,
    "lk_hybrid": lk_hybrid,
}
ACCEPTANCES = {"tv", "lk", "lk_hybrid"}
ACCEPTED = "accepted_length"
"""The term that couples the depths of a row; its rows are in `losses._accepted`."""


@dataclass(frozen=True)
class Objective:
    """A mix of terms.

    Attributes:
        weights: of the terms that each loss row gives alone, by name.
        accepted: weight of the accepted length.
        lk_eta: eta of `lk_hybrid`.
    """

    weights: Mapping[str, float]
    accepted: float = 0.0
    lk_eta: float = 3.0

    @property
    def is_acceptance(self) -> bool:
        """Does it read p as it is, and not only renormalised on the draft vocabulary?"""
        return self.accepted > 0 or not ACCEPTANCES.isdisjoint(self.weights)

    def rows(self, laws: Laws) -> Tensor:
        """[M] the loss of each row but for the accepted length."""
        terms = TERMS | {"lk_hybrid": partial(lk_hybrid, eta=self.lk_eta)}
        parts = [weight * terms[name](laws) for name, weight in self.weights.items()]
        return sum(parts[1:], parts[0]) if parts else laws.logits_MD.new_zeros(len(laws.label_M))


def objective(loss: str | Mapping[str, float], lk_eta: float = 3.0) -> Objective:
    """The objective of a config: a term's name, or weights by name."""
    mix = dict(check_loss(loss)) if not isinstance(loss, str) else {check_loss(loss): 1.0}
    accepted = mix.pop(ACCEPTED, 0.0)
    return Objective(mix, accepted, lk_eta)


def check_loss(loss: Any) -> Any:
    """Hands on what `objective` can use.

    Raises:
        ValueError: an unknown term, or a weight that is not positive.
    """
    known = [*TERMS, ACCEPTED]
    mix = {loss: 1.0} if isinstance(loss, str) else loss
    if not (isinstance(mix, dict) and mix):
        raise ValueError(f"a name or weights by name are wanted: {', '.join(known)}")
    for name, weight in mix.items():
        if name not in known:
            raise ValueError(f"no objective {name!r}. {nearest(str(name), known)}")
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not (number and 0 < weight < math.inf):
            raise ValueError(f"weight {weight!r} of {name!r}: a number above 0 is wanted")
    return loss
