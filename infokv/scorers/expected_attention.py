"""Expected Attention: what queries to come will probably attend to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from infokv.errors import Refused
from infokv.kernels import LayerFacts
from infokv.scorer import Scorer
from infokv.signals import TokenSignals, signal


@dataclass(frozen=True)
class ExpectedAttention(Scorer):
    """Tokens that later queries, taken for normally distributed, will probably attend to.

    Parameters
    ----------
    n_future : int
        Positions ahead over which rotations are averaged.
    n_sink : int
        First tokens that are always kept; neither their queries nor their keys count.
    use_covariance : bool
        Whether the spread of the queries counts beside their mean.
    use_vnorm : bool
        Whether weights are multiplied by the norm of the token's value.
    epsilon : float
        Added to the weights before that.

    Notes
    -----
    Source: Expected Attention (arXiv 2510.00636) and kvpress, ExpectedAttentionPress, defaults included. No
    recent tokens are kept by rule. A layer's soft-cap and sliding window are not part of it.
    """

    n_future: int = 512
    n_sink: int = 4
    use_covariance: bool = True
    use_vnorm: bool = True
    epsilon: float = 0.0

    def __post_init__(self):
        if self.n_future < 1 or self.n_sink < 0:
            raise Refused(f"n_future is {self.n_future} and n_sink {self.n_sink}; n_future >= 1 and n_sink >= 0.")
        if not 0 <= self.epsilon < float("inf"):
            raise Refused(f"epsilon is {self.epsilon}; it must be 0 or more.")

    @property
    def needs(self) -> tuple[str, ...]:
        future = signal("future_queries", skip=self.n_sink, future=self.n_future)
        return (future, "keys", "values") if self.use_vnorm else (future, "keys")

    @property
    def sinks(self) -> int:
        return self.n_sink

    def score(self, signals: TokenSignals) -> torch.Tensor:
        """``[layers, kv_heads, tokens]``; 0 for the sinks."""
        layers, sinks = range(signals.layers), signals.held_before(self.n_sink)
        found = [
            self._of_layer(signals[self.needs[0]][i], signals.keys[i][:, sinks:].float(), signals.facts[i])
            for i in layers
        ]
        if self.use_vnorm:
            norms = [signals.values[i][:, sinks:].float().norm(dim=-1) for i in layers]
            found = [(weights + self.epsilon) * norm for weights, norm in zip(found, norms, strict=True)]
        scores = torch.stack([one.to(found[-1].device) for one in found])
        return F.pad(scores, (signals.tokens - scores.shape[-1], 0))

    def _of_layer(self, moments: torch.Tensor, keys: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
        """Expected weights ``[kv_heads, tokens]``; moments ``[query_heads, 1 + head_dim, head_dim]``."""
        heads = keys.shape[0]
        moments = moments.reshape(heads, -1, *moments.shape[1:])
        out = []
        for one, key in zip(moments, keys, strict=True):  # one KV head at a time: group x tokens x head_dim numbers
            logits = one[:, 0] @ key.T * facts.scaling
            if self.use_covariance:
                logits = logits + ((key @ one[:, 1:]) * key).sum(dim=-1) * (facts.scaling**2 / 2)
            out.append(logits.softmax(dim=-1).mean(dim=0))
        return torch.stack(out)
