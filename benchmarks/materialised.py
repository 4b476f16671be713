"""What a user would write without the library: all sampled logits at once, plain PyTorch, dense gradients."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Materialised(nn.Module):
    """CosFace over `num_sampled` random classes, with `[N, S]` logits in the dtype of the embeddings; one process."""

    def __init__(self, weight: Tensor, num_sampled: int, scale: float, m: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.num_sampled, self.scale, self.m = num_sampled, scale, m

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss over the rows of `embeddings` `[N, D]`, whose classes are `labels` `[N]`."""
        weight: Tensor = self.weight
        if self.num_sampled < len(weight):
            score = torch.rand(len(weight)).index_fill(0, labels, 2.0)
            index = score.topk(self.num_sampled).indices.sort().values
            weight, labels = weight[index], torch.searchsorted(index, labels)
        cosine = F.linear(F.normalize(embeddings), F.normalize(weight).to(embeddings.dtype)).float()
        logits = self.scale * (cosine - self.m * F.one_hot(labels, len(weight)))
        return F.cross_entropy(logits, labels)
