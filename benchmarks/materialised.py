"""What a user would write without the library: all sampled logits at once, plain PyTorch, dense gradients."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Materialised(nn.Module):
    """CosFace over a random part of the classes, with `[N, S]` logits; one process."""

    def __init__(self, embedding_dim: int, num_classes: int, sample_rate: float, scale: float, m: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_classes, embedding_dim) * 0.01)
        self.num_sampled, self.scale, self.m = int(num_classes * sample_rate), scale, m

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if self.num_sampled < len(weight):
            score = torch.rand(len(weight)).index_fill(0, labels, 2.0)
            index = score.topk(self.num_sampled).indices.sort().values
            weight, labels = weight[index], torch.searchsorted(index, labels)
        cosine = F.normalize(embeddings) @ F.normalize(weight).T
        logits = self.scale * (cosine - self.m * F.one_hot(labels, len(weight)))
        return F.cross_entropy(logits, labels)
