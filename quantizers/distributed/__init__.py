"""The processes of a run, as torchrun or accelerate launch start them, on torch.distributed."""
