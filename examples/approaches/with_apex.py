"""Apex: amp casts model and inputs to fp16 and keeps fp32 masters (O2), its DistributedDataParallel averages gradients.

easymp launch --processes 2 examples/approaches/with_apex.py
"""

import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from task import BATCH, LR, Net, Prefetcher, arguments, leave, load, place, report, share, sums, updates
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from easymp.compat.apex import amp  # from apex import amp
from easymp.compat.apex.parallel import (
    DistributedDataParallel,
)  # from apex.parallel import DistributedDataParallel


def train(args, device):
    rank, size = dist.get_rank(), dist.get_world_size()

    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, loss_scale=args.loss_scale)
    model = DistributedDataParallel(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, updates(args.epochs))

    training, test = load()
    pinned = device.type == "cuda"
    sampler = DistributedSampler(training)
    loader = DataLoader(training, batch_size=BATCH // size, sampler=sampler, drop_last=True, pin_memory=pinned)
    test_loader = DataLoader(share(test, rank, size), batch_size=128, pin_memory=pinned)

    begin = time.perf_counter()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in Prefetcher(loader, device):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            scheduler.step()

        found = sums(model, Prefetcher(test_loader, device))
        dist.all_reduce(found)
        loss, right, count = found.tolist()
        if rank == 0:
            print(f"epoch {epoch}: test loss {loss / count:.4f}, accuracy {right / count:.2%}")
    if rank == 0:
        report(loss / count, right / count, time.perf_counter() - begin)


def main():
    parser = arguments(__doc__)
    parser.add_argument("--local_rank", "--local-rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    parser.add_argument("--opt-level", default="O2")
    parser.add_argument("--loss-scale", default=None)
    args = parser.parse_args()
    torch.manual_seed(0)
    device, backend = place(args.local_rank)
    dist.init_process_group(backend, init_method="env://")
    train(args, device)
    leave()


if __name__ == "__main__":
    main()
