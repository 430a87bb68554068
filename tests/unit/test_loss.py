"""The loss against torch's cross entropy, positions against torchtitan's order."""

import torch
import torch.nn.functional as F
from torchtitan.config import JobConfig

from torchtitan_simplefsdp.titan.context_parallel import get_positions
from torchtitan_simplefsdp.titan.loss import build_loss


def test_the_loss_is_the_token_sum_and_is_divided_only_inside_the_context():
    pred, labels = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    expected = F.cross_entropy(pred.flatten(0, 1), labels.flatten(), reduction="sum")
    loss_fn = build_loss(JobConfig())
    assert torch.equal(loss_fn(pred, labels), expected)
    with loss_fn.divided_by(torch.tensor(6)):
        assert torch.equal(loss_fn(pred, labels), expected / 6)
    assert torch.equal(loss_fn(pred, labels), expected)


def test_positions_of_context_parallel_shards_follow_torchtitans_head_and_tail_order():
    assert get_positions(8, 2, load_balanced=True).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert get_positions(8, 2, load_balanced=False).tolist() == list(range(8))
