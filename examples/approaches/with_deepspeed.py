"""DeepSpeed: an engine takes the model, and a file says how it trains: in bf16, with the optimizer's states in shares.

easymp launch --processes 2 examples/approaches/with_deepspeed.py     in place of deepspeed --num_gpus 2 …
"""

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from task import Net, Prefetcher, arguments, load, report, share, sums
from torch.utils.data import DataLoader

from easymp.compat import deepspeed  # import deepspeed


def main():
    parser = deepspeed.add_config_arguments(arguments(__doc__))
    parser.add_argument("--local_rank", type=int, default=-1, help="passed by DeepSpeed's own launcher")
    parser.set_defaults(deepspeed_config=str(Path(__file__).with_name("ds_config.json")))
    args = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)

    training, test = load()
    model = Net()
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=training
    )
    rank, size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    test_loader = DataLoader(share(test, rank, size), batch_size=128, pin_memory=engine.device.type == "cuda")

    begin = time.perf_counter()
    for epoch in range(args.epochs):
        for images, labels in Prefetcher(loader, engine.device):
            loss = F.cross_entropy(engine(images), labels)
            engine.backward(loss)
            engine.step()

        found = sums(engine, Prefetcher(test_loader, engine.device))
        deepspeed.comm.all_reduce(found)
        loss, right, count = found.tolist()
        if rank == 0:
            print(f"epoch {epoch}: test loss {loss / count:.4f}, accuracy {right / count:.2%}")
    if rank == 0:
        report(loss / count, right / count, time.perf_counter() - begin)
    engine.destroy()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
