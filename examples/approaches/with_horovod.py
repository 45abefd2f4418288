"""Horovod: an optimizer that averages gradients over the processes before it steps, in fp16 on their way.

easymp launch --processes 2 examples/approaches/with_horovod.py     in place of horovodrun -np 2 python …
"""

import time

import torch
import torch.nn.functional as F
from task import BATCH, LR, Net, Prefetcher, arguments, load, place, report, share, sums, updates
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import easymp.compat.horovod as hvd  # import horovod.torch as hvd


def main():
    args = arguments(__doc__).parse_args()
    hvd.init()
    torch.manual_seed(hvd.rank())
    device, _ = place(hvd.local_rank())

    training, test = load()
    pinned = device.type == "cuda"
    sampler = DistributedSampler(training, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(training, batch_size=BATCH // hvd.size(), sampler=sampler, drop_last=True, pin_memory=pinned)
    test_loader = DataLoader(share(test, hvd.rank(), hvd.size()), batch_size=128, pin_memory=pinned)

    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.fp16
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, updates(args.epochs))

    begin = time.perf_counter()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in Prefetcher(loader, device):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()

        found = sums(model, Prefetcher(test_loader, device))
        loss, right, count = hvd.allreduce(found, op=hvd.Sum, name="evaluation").tolist()
        if hvd.rank() == 0:
            print(f"epoch {epoch}: test loss {loss / count:.4f}, accuracy {right / count:.2%}")
    if hvd.rank() == 0:
        report(loss / count, right / count, time.perf_counter() - begin)
    hvd.shutdown()


if __name__ == "__main__":
    main()
